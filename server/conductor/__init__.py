"""The Conductor as a service: instances and nodes report to it, gateways ask it where requests go."""
