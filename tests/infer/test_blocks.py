"""Who owns which block, against a model of it in plain sets."""

import random

from lowbit.infer.blocks import BlockPool


def test_names_depend_on_everything_before_and_on_the_version() -> None:
    pool = BlockPool(20, 4)
    tokens = list(range(12))
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.register(tokens, blocks, 1)
    assert pool.match([*tokens, 5], 1) == blocks
    assert pool.match(tokens, 1) == blocks[:2], "the last token has to be read, to know what follows it"
    assert pool.match([9, *tokens[1:], 5], 1) == []
    assert pool.match([*tokens[:4], 9, *tokens[5:], 5], 1) == blocks[:1]
    assert pool.match([*tokens, 5], 2) == pool.match([], 1) == []
    pool.forget()
    assert pool.match([*tokens, 5], 1) == []


def test_the_longest_unused_goes_first_and_the_end_of_a_sequence_before_its_beginning() -> None:
    pool = BlockPool(7, 1)
    first, second = pool.allocate(3), pool.allocate(3)
    assert first is not None and second is not None and pool.allocate(1) is None
    pool.register([1, 2, 3], first, 0)
    pool.register([4, 5, 6], second, 0)
    pool.release(second)
    pool.release(first)
    assert pool.available == 6
    assert pool.allocate(2) == [second[2], second[1]]
    found = pool.match([4, 5, 6, 0], 0)
    assert found == second[:1], "found again, and in use"
    assert pool.allocate(3) == [first[2], first[1], first[0]] and pool.allocate(1) is None


def test_random_use_loses_no_block_and_shares_only_equal_prefixes() -> None:
    pick = random.Random(3)
    pool, running = BlockPool(40, 2), []
    holds: dict[int, tuple[int, ...]] = {}  # what a block's keys are of
    for _ in range(4000):
        if running and (pick.random() < 0.5 or pool.available < 8):
            tokens, blocks = running.pop(pick.randrange(len(running)))
            pool.register(tokens, blocks, 0)
            pool.release(blocks)
            continue
        tokens = [pick.randrange(3) for _ in range(pick.randrange(1, 12))]
        found = pool.match(tokens, 0)
        for i, block in enumerate(found):
            assert holds[block] == tuple(tokens[: 2 * i + 2])
        new = pool.allocate(-(-len(tokens) // 2) - len(found))
        if new is None:
            pool.release(found)
            continue
        in_use = {block for _, blocks in running for block in blocks}
        assert not in_use & set(new) and 0 not in new
        blocks = found + new
        holds |= {block: tuple(tokens[: 2 * i + 2]) for i, block in enumerate(blocks)}
        running.append((tokens, blocks))
    assert pool.hits > 100
    for _, blocks in running:
        pool.release(blocks)
    assert pool.available == 39
    pool.grow(50)
    assert len(set(pool.allocate(49) or [])) == 49
