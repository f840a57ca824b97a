"""Both bindings do on real verbs what the contract says."""

from tests.verbs_contract import VerbsContract


class TestBindings(VerbsContract):
    """The fixture `verbs` is each binding in turn."""
