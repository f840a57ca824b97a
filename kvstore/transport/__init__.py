"""How bytes travel: shared memory on a host, frames over a stream elsewhere. One way per file."""
