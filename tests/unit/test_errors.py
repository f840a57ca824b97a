"""The tree of errors: what a caller and the wire may rely on for each of them."""

import inspect

import pytest

from kvstore import errors
from kvstore.errors import ERRORS, Rejected, StoreError, TierFull, TransportError

TREE = sorted(ERRORS.values(), key=lambda error: error.__name__)


@pytest.mark.parametrize("error", TREE, ids=lambda error: error.__name__)
class TestEachError:
    def test_is_made_of_a_message_and_says_it(self, error: type[StoreError]) -> None:
        assert str(error("the reason")) == "the reason"

    def test_has_a_code_of_its_own(self, error: type[StoreError]) -> None:
        assert "code" in vars(error)
        assert error.code.isidentifier()
        assert error.code == error.code.lower()
        assert ERRORS[error.code] is error

    def test_is_drawn_in_the_module(self, error: type[StoreError]) -> None:
        assert error.__name__ in (errors.__doc__ or "")

    def test_is_caught_as_a_store_error_and_never_as_a_broken_invariant(self, error: type[StoreError]) -> None:
        assert issubclass(error, StoreError)
        assert not issubclass(error, AssertionError | OSError | ValueError)


def test_every_error_of_the_module_is_in_the_tree() -> None:
    declared = [
        found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__
    ]
    assert set(declared) == set(TREE)


def test_what_may_succeed_later_is_retryable() -> None:
    retryable = {error for error in TREE if error.retryable}
    assert retryable == {TierFull, Rejected, TransportError, *TransportError.__subclasses__()}


def test_a_rejection_says_when_to_ask_again() -> None:
    assert Rejected("too much").retry_after_s > 0
    assert Rejected("too much", retry_after_s=2.5).retry_after_s == 2.5
