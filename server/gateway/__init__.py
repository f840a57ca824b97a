"""The gateway: an OpenAI-compatible front of engines, whose requests go where the Conductor says."""
