"""What runs inside an engine's process: clients of the store, the layout of its blocks, engine adapters."""
