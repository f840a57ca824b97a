"""The processes: a node, its REST interface and its commands."""
