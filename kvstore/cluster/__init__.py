"""Many nodes as one pool: who is a member, who holds what, and how blocks come from one to another."""
