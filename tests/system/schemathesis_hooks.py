"""What the fuzzer knows beyond the OpenAPI document: which namespace and blocks there are, and how large a tier may be.

Loaded by schemathesis itself (SCHEMATHESIS_HOOKS), in its own process.
"""

from typing import Any

import schemathesis
from xxhash import xxh3_64_hexdigest

NAMESPACE = "there"
KEYS = [f"{number:032x}" for number in range(4)]


def _choice(case: Any, options: int) -> int:
    """The same for the same case, so that a run can be repeated."""
    return int(xxh3_64_hexdigest(repr((case.path_parameters, case.query, case.body)).encode())[:8], 16) % options


@schemathesis.hook
def map_case(context: Any, case: Any) -> Any:
    """Of the requests that should be accepted, let half be about what is there."""
    if case.meta is None or not case.meta.generation.mode.is_positive:
        return case
    path, method = case.operation.path, case.operation.method.upper()
    if "ns" in case.path_parameters and not (path.endswith("{ns}") and method == "PUT") and _choice(case, 2):
        case.path_parameters["ns"] = NAMESPACE
        if "key" in case.path_parameters:
            case.path_parameters["key"] = KEYS[_choice(case, len(KEYS))]
        if isinstance(case.body, dict) and case.body.get("keys"):
            case.body["keys"] = KEYS[: _choice(case, len(KEYS)) + 1]
    for name in [name for name in case.headers or {} if name.lower() == "x-cairn-checksum"]:
        del case.headers[name]  # the document cannot say that it depends on the body
    return case
