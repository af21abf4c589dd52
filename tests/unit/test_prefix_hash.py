"""Chain hashes: equal exactly when everything that shaped a block's keys and values is equal."""

from __future__ import annotations

import hashlib
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.text_engine.core.prefix_hash import extend_block_hashes
from services.text_engine.core.sequence import ImageSpan, Sequence
from shared.hashing import IMAGE_KEY_SCHEME, digest, image_key
from shared.sampling import SamplingParams

PLACEHOLDER = 7
CAT, PIZZA = "c" * 64, "d" * 64


def hashes_of(
    token_ids: list[int], *images: ImageSpan, salt: bytes = b"", block_size: int = 4, num_prompt: int | None = None
) -> list[bytes]:
    sequence = Sequence(
        "r",
        list(token_ids),
        num_prompt or len(token_ids),
        SamplingParams(),
        max_total_tokens=1000,
        images=images,
        cache_salt=salt,
    )
    return list(extend_block_hashes(sequence, block_size))


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    """How many leading blocks are the same."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


def picture_prompt(image: str, *, num_text: int = 8, num_rows: int = 8) -> list[bytes]:
    """`num_text` tokens, an image, a question; in blocks of 4."""
    token_ids = [*range(100, 100 + num_text), *[PLACEHOLDER] * num_rows, 1, 2, 3, 4]
    return hashes_of(token_ids, ImageSpan(image, num_text, num_rows))


@pytest.mark.parametrize(("num_tokens", "num_full"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (13, 3)])
def test_only_full_blocks_have_a_hash(num_tokens: int, num_full: int):
    assert len(hashes_of(list(range(num_tokens)))) == num_full


def test_equal_prefixes_have_equal_hashes_up_to_the_first_difference():
    one = hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    other = hashes_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 99, 12])
    assert num_shared(one, other) == 2


def test_a_block_depends_on_every_token_before_it():
    one = hashes_of([1, 2, 3, 4, 5, 6, 7, 8])
    other = hashes_of([99, 2, 3, 4, 5, 6, 7, 8])
    assert one[1] != other[1]


def test_a_repeated_block_differs_from_its_first_occurrence():
    first, second = hashes_of([1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_the_line_between_prompt_and_answer_does_not_matter():
    assert hashes_of([1, 2, 3, 4, 5, 6, 7, 8], num_prompt=2) == hashes_of([1, 2, 3, 4, 5, 6, 7, 8], num_prompt=8)


def test_hashes_grow_with_the_sequence_and_never_change():
    token_ids = [PLACEHOLDER if 5 <= i < 9 else i for i in range(19)]
    span = ImageSpan(CAT, 5, 4)
    sequence = Sequence("r", token_ids[:6], 6, SamplingParams(), 1000, images=(span,))
    for token_id in token_ids[6:]:
        before = list(extend_block_hashes(sequence, 4))
        sequence.token_ids.append(token_id)
        assert extend_block_hashes(sequence, 4)[: len(before)] == before
    assert sequence.block_hashes == hashes_of(token_ids, span)


def test_different_pictures_of_equal_size_share_only_the_text_before_them():
    cat, pizza = picture_prompt(CAT), picture_prompt(PIZZA)
    assert num_shared(cat, picture_prompt(CAT)) == len(cat) == 5
    assert num_shared(cat, pizza) == 2


def test_a_picture_that_begins_inside_a_block_changes_that_block():
    assert num_shared(picture_prompt(CAT, num_text=6), picture_prompt(PIZZA, num_text=6)) == 1


def test_text_behind_a_picture_depends_on_the_picture():
    assert picture_prompt(CAT)[4] != picture_prompt(PIZZA)[4]


def test_the_same_rows_at_another_offset_of_the_image_differ():
    """A block that holds rows 0..3 of an image never answers for one that holds rows 4..7 of it."""
    tokens = [PLACEHOLDER] * 4
    assert hashes_of(tokens, ImageSpan(CAT, 0, 4)) != hashes_of(tokens, ImageSpan(CAT, -4, 8))


def test_a_span_that_begins_in_the_middle_of_its_image_holds_those_rows():
    """An image in several runs: the second run's first row is not the image's."""
    tokens = [PLACEHOLDER] * 4
    second_run = hashes_of(tokens, ImageSpan(CAT, 0, 4, first_row=4))
    assert second_run != hashes_of(tokens, ImageSpan(CAT, 0, 4))
    assert second_run == hashes_of(tokens, ImageSpan(CAT, -4, 8))


def test_the_position_of_an_image_within_a_block_matters():
    tokens = [PLACEHOLDER] * 4
    assert hashes_of(tokens, ImageSpan(CAT, 0, 2)) != hashes_of(tokens, ImageSpan(CAT, 2, 2))


def test_two_pictures_in_one_block_are_told_apart_in_both_orders():
    tokens = [PLACEHOLDER] * 4
    one = hashes_of(tokens, ImageSpan(CAT, 0, 2), ImageSpan(PIZZA, 2, 2))
    other = hashes_of(tokens, ImageSpan(PIZZA, 0, 2), ImageSpan(CAT, 2, 2))
    assert one != other


def test_placeholder_ids_without_an_image_are_not_an_image():
    tokens = [PLACEHOLDER] * 4
    assert hashes_of(tokens) != hashes_of(tokens, ImageSpan(CAT, 0, 4))


def test_the_number_of_image_rows_in_a_block_matters():
    tokens = [PLACEHOLDER] * 4  # in the first prompt the last two are text that has the placeholder's id
    assert hashes_of(tokens, ImageSpan(CAT, 0, 2)) != hashes_of(tokens, ImageSpan(CAT, 0, 4))


def test_another_salt_shares_nothing():
    tokens = list(range(12))
    assert num_shared(hashes_of(tokens, salt=b"tenant a"), hashes_of(tokens, salt=b"tenant b")) == 0
    assert num_shared(hashes_of(tokens, salt=b"tenant a"), hashes_of(tokens)) == 0
    assert num_shared(hashes_of(tokens, salt=b"tenant a"), hashes_of(tokens, salt=b"tenant a")) == 3


def test_token_ids_beyond_32_bits_are_not_cut_short():
    assert hashes_of([1, 2, 3, 4]) != hashes_of([1 + 2**32, 2, 3, 4])


block_contents = st.tuples(
    st.lists(st.integers(0, 2), min_size=4, max_size=12), st.sampled_from([None, CAT, PIZZA]), st.integers(0, 3)
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(one=block_contents, other=block_contents)
def test_two_prompts_share_a_block_exactly_when_all_up_to_its_end_is_equal(one, other):
    def contents(prompt) -> tuple[list[object], list[bytes]]:
        token_ids, image, start = prompt
        if image is None:
            return list(token_ids), hashes_of(token_ids)
        token_ids = [*token_ids[:start], *[PLACEHOLDER] * 4, *token_ids[start:]]
        positions = [(image, i - start) if start <= i < start + 4 else token_id for i, token_id in enumerate(token_ids)]
        return positions, hashes_of(token_ids, ImageSpan(image, start, 4))

    (positions, hashes), (other_positions, other_hashes) = contents(one), contents(other)
    for i, (a, b) in enumerate(zip(hashes, other_hashes, strict=False)):
        end = 4 * (i + 1)
        assert (a == b) == (positions[:end] == other_positions[:end])


# --- shared/hashing.py --------------------------------------------------------------------------------------------


def test_a_digest_is_the_sha256_of_length_prefixed_parts():
    expected = hashlib.sha256(b"\0\0\0\0\0\0\0\2ab\0\0\0\0\0\0\0\0").digest()
    assert digest(b"ab", b"") == expected


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(st.lists(st.binary(max_size=4), max_size=4), st.lists(st.binary(max_size=4), max_size=4))
def test_different_lists_of_parts_never_give_the_same_digest(one: list[bytes], other: list[bytes]):
    assert (digest(*one) == digest(*other)) == (one == other)


def test_every_way_to_split_the_same_bytes_has_its_own_digest():
    whole = b"abcd"
    splits = [
        [whole[i:j] for i, j in pairwise((0, *cuts, len(whole)))] for cuts in ((), (1,), (2,), (3,), (1, 2), (0,), (4,))
    ]
    assert len({digest(*parts) for parts in splits}) == len(splits)


def test_a_part_that_looks_like_a_length_prefix_is_still_one_part():
    assert digest(b"a", b"b") != digest(b"a" + (1).to_bytes(8, "big") + b"b")


def test_an_image_key_names_scheme_encoder_and_bytes_in_full():
    key = image_key(b"bytes", "encoder")
    assert key == digest(IMAGE_KEY_SCHEME, b"encoder", b"bytes").hex()
    assert len(key) == 64
    assert len({key, image_key(b"bytes!", "encoder"), image_key(b"bytes", "encoder 2"), image_key(b"", "")}) == 4


def test_an_image_key_does_not_confuse_fingerprint_and_bytes():
    assert image_key(b"bytes", "encoder") != image_key(b"rbytes", "encode")
