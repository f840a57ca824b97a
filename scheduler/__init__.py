"""The Conductor: decides which prefill and decode instance takes a request."""
