"""`cairn worker`: an engine of its own, OpenAI-compatible, whose prefixes come from the store and go to it."""
