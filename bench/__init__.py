"""What Cairn reaches on this machine, each figure beside its floor from the same run."""
