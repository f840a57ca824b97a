"""Tenants and the namespaces they opened: which name stands for what, and which number and root it has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvstore.errors import InvalidRequest, NamespaceMismatch, NotFound, Rejected
from kvstore.prefix import Namespace
from kvstore.table import Space
from kvstore.types import DRAM, HBM, KEY_BYTES, NVME, BlockKey

NAMESPACES_PER_NODE = 65_535  # its number is a u16 in the published index
NAME_BYTES = 128


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who stores here. `quota_bytes` 0 is no quota. The secret makes its keys unguessable to others."""

    name: str
    secret: str = field(default="", repr=False)
    quota_bytes: int = 0
    may_write: bool = True
    admin: bool = False


@dataclass(slots=True, eq=False)
class OpenNamespace:
    """A namespace of a tenant on this node; `spaces` are its replicas by tier, fastest first, `dram` one of them."""

    number: int
    tenant: Tenant
    namespace: Namespace
    root: BlockKey
    dram: Space
    spaces: tuple[Space, ...]
    nvme: Space | None = None  # one of `spaces` too, where there is that tier
    hbm: Space | None = None  # so is this
    names: list[str] = field(default_factory=list)
    hit_blocks: int = 0
    missed_blocks: int = 0
    replicas: int = 0  # copies of each block to keep in a cluster; 0: as many as heat asks for
    through: bool = False  # commits wait for them

    @property
    def key_bytes(self) -> int:
        return KEY_BYTES if self.namespace.parts == 1 else KEY_BYTES + 2


class Catalogue:
    """Namespaces by tenant and name. Two names for the same fields are the same namespace.

    `new_spaces` makes the places for a new namespace's replicas: (tenant, number) -> by tier, fastest first.
    """

    def __init__(self, namespaces_per_tenant: int, new_spaces: Callable[[str, int], tuple[Space, ...]]) -> None:
        self._limit = namespaces_per_tenant
        self._new_spaces = new_spaces
        self._by_name: dict[tuple[str, str], OpenNamespace] = {}
        self._by_root: dict[tuple[str, BlockKey], OpenNamespace] = {}
        self._by_number: dict[int, OpenNamespace] = {}
        self._numbers = count(1)

    def find(self, tenant: Tenant, name: str) -> OpenNamespace:
        found = self._by_name.get((tenant.name, name))
        if found is None:
            raise NotFound(f"no namespace {name!r} of tenant {tenant.name}")
        return found

    def of_fields(self, tenant: Tenant, namespace: Namespace) -> OpenNamespace:
        """The namespace that has these fields, under whatever name. NotFound."""
        found = self._by_root.get((tenant.name, namespace.root(tenant.name, tenant.secret)))
        if found is None:
            raise NotFound(f"no namespace of tenant {tenant.name} has these fields")
        return found

    def numbered(self, tenant: Tenant, number: int) -> OpenNamespace:
        """The namespace that the tenant opened under this number."""
        found = self._by_number.get(number)
        if found is None or found.tenant.name != tenant.name:
            raise NotFound(f"no namespace number {number} of tenant {tenant.name}")
        return found

    def of_number(self, number: int) -> OpenNamespace | None:
        return self._by_number.get(number)

    def all(self) -> Iterator[OpenNamespace]:
        return iter(self._by_number.values())

    def of_tenant(self, tenant: Tenant) -> Iterator[OpenNamespace]:
        return (found for found in self._by_number.values() if found.tenant.name == tenant.name)

    def define(self, tenant: Tenant, name: str, namespace: Namespace) -> tuple[OpenNamespace, bool]:
        """The namespace behind `name`, made if need be: (it, whether the name is new).

        Raises NamespaceMismatch when the name stands for other fields, Rejected at the limit.
        """
        if not name.isprintable() or not 0 < len(name.encode()) <= NAME_BYTES or "/" in name:
            raise InvalidRequest(f"a namespace's name has 1 to {NAME_BYTES} printable bytes and no '/'")
        found = self._by_name.get((tenant.name, name))
        if found is not None:
            differences = found.namespace.differences(namespace)
            if differences:
                raise NamespaceMismatch(f"{name!r} stands for another namespace: {'; '.join(differences)}")
            return found, False
        root = namespace.root(tenant.name, tenant.secret)
        found = self._by_root.get((tenant.name, root))
        if sum(key[0] == tenant.name for key in self._by_name) >= self._limit:
            raise Rejected(f"tenant {tenant.name} has {self._limit} namespaces: namespaces_per_tenant")
        if found is None:
            if len(self._by_number) >= NAMESPACES_PER_NODE:
                raise Rejected(f"this node has {NAMESPACES_PER_NODE} namespaces, as many as it can number")
            found = self._add(next(self._numbers), tenant, namespace, root)
        found.names.append(name)
        self._by_name[tenant.name, name] = found
        return found, True

    def is_free(self, number: int, tenant: Tenant, root: bytes, names: Sequence[str]) -> bool:
        """Whether `restore` may use these."""
        is_known = number in self._by_number or (tenant.name, BlockKey(root)) in self._by_root
        return not is_known and not any((tenant.name, name) in self._by_name for name in names)

    def restore(self, number: int, tenant: Tenant, names: Sequence[str], namespace: Namespace) -> OpenNamespace:
        """Take up a namespace of an earlier start. Its number, root and names are nobody's yet."""
        root = namespace.root(tenant.name, tenant.secret)
        assert number not in self._by_number
        assert (tenant.name, root) not in self._by_root
        found = self._add(number, tenant, namespace, root)
        self.reserve(number)
        for name in names:
            found.names.append(name)
            self._by_name[tenant.name, name] = found
        return found

    def reserve(self, number: int) -> None:
        """Give no new namespace this number, or one below it: something is known under it."""
        self._numbers = count(max(number + 1, next(self._numbers)))

    def _add(self, number: int, tenant: Tenant, namespace: Namespace, root: BlockKey) -> OpenNamespace:
        spaces = self._new_spaces(tenant.name, number)
        by_tier = {space.tier: space for space in spaces}
        found = OpenNamespace(
            number, tenant, namespace, root, by_tier[DRAM], spaces, by_tier.get(NVME), by_tier.get(HBM)
        )
        self._by_root[tenant.name, root] = found
        self._by_number[number] = found
        return found
