"""The parts of the simulated cluster: events in virtual time, engines, caches, links."""
