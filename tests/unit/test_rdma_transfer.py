"""What one READ fetches: blocks that lie side by side at both ends are one."""

from kvstore.transport.rdma.transfer import Fetch, Transfer, merged

HERE, THERE, OTHER = (1,), (2,), (3,)


def fetch(at: int, there: int, size: int = 100, rkeys: tuple[int, ...] = THERE) -> Fetch:
    return Fetch(at, HERE, there, rkeys, size)


def test_neighbours_at_both_ends_are_one_up_to_a_bound() -> None:
    fetches = [fetch(at, 5000 + at) for at in range(0, 500, 100)]
    assert merged(fetches, 300) == [fetch(0, 5000, 300), fetch(300, 5300, 200)]


def test_neighbours_at_one_end_only_stay_two() -> None:
    assert len(merged([fetch(0, 5000), fetch(100, 5200)], 1000)) == 2
    assert len(merged([fetch(0, 5000), fetch(200, 5100)], 1000)) == 2


def test_neighbours_with_another_key_stay_two() -> None:
    assert len(merged([fetch(0, 5000), fetch(100, 5100, rkeys=OTHER)], 1000)) == 2


def test_a_block_is_cut_into_slices_without_a_byte_lost() -> None:
    pieces = Transfer([fetch(0, 5000, 250), fetch(1000, 9000, 50)], 100).pending
    assert [(piece.address, piece.remote_address, piece.size) for piece in pieces] == [
        (0, 5000, 100),
        (100, 5100, 100),
        (200, 5200, 50),
        (1000, 9000, 50),
    ]
