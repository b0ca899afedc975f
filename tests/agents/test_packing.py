"""Packing: every token has one place, and sequences that begin alike share theirs, seeing only what each alone sees."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agents.packing import pack_rows, token_parts


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=12), st.integers(1, 30))
def test_every_token_stands_in_one_place_of_a_row_and_sequences_are_whole(lengths, width):
    sequences = [np.arange(n) + 1000 * (i + 1) for i, n in enumerate(lengths)]
    rows = pack_rows(sequences, width, share=True)  # nothing is to share
    assert rows.visible is None
    assert rows.token_ids.shape == rows.positions.shape and rows.token_ids.shape[1] <= max(width, *lengths)
    assert rows.token_ids.flatten()[rows.places].tolist() == np.concatenate(sequences).tolist()
    assert rows.positions.flatten()[rows.places].tolist() == [i for n in lengths for i in range(n)]
    filler = np.setdiff1d(np.arange(rows.token_ids.numel()), rows.places)
    assert len(set(rows.places)) == sum(lengths) and not rows.positions.flatten()[filler].any()
    ends = np.cumsum(lengths)
    for start, end in zip(ends - lengths, ends):
        places = rows.places[start:end]
        assert (np.diff(places) == 1).all() and len(set(places // rows.token_ids.shape[1])) == 1


@settings(deadline=None)
@given(st.lists(st.lists(st.integers(1, 2), min_size=1, max_size=8), min_size=1, max_size=12), st.integers(1, 30))
def test_whatever_is_shared_each_token_sees_its_own_sequence_up_to_itself(sequences, width):
    sequences = [np.array(s) for s in sequences]
    rows = pack_rows(sequences, width, share=True)
    longest = max(len(s) for s in sequences)
    ids, positions = (x.flatten().numpy() for x in (rows.token_ids, rows.positions))
    assert rows.token_ids.shape[1] <= max(width, longest)
    for places, sequence in zip(np.split(rows.places, np.cumsum([len(s) for s in sequences])[:-1]), sequences):
        assert ids[places].tolist() == sequence.tolist() and positions[places].tolist() == list(range(len(sequence)))
        if rows.visible is not None:
            row, columns = places[0] // rows.token_ids.shape[1], places % rows.token_ids.shape[1]
            for i, column in enumerate(columns):
                assert np.flatnonzero(rows.visible[row, column]).tolist() == columns[:i + 1].tolist()
    if rows.visible is not None:
        assert rows.visible.any(-1).all()  # the filler too: a softmax over nothing is NaN
    # In one row each beginning stands there once.
    whole = pack_rows(sequences, 1000, share=True)
    beginnings = {tuple(s[:n]) for s in sequences for n in range(1, len(s) + 1)}
    assert len(set(whole.places)) == len(beginnings) == whole.token_ids.shape[1]


def test_a_common_prompt_stands_in_a_row_once_unless_sharing_is_off():
    # A prompt of 6 and four responses of 2: 14 tokens, not 32; in rows of 10, twice 6 + 2 * 2.
    sequences = [np.array([1, 2, 3, 4, 5, 6, 10 + i, 20 + i]) for i in range(4)]
    assert pack_rows(sequences, 100, share=True).token_ids.shape == (1, 14)
    assert pack_rows(sequences, 10, share=True).token_ids.shape == (2, 10)
    apart = pack_rows(sequences, 100, share=False)
    assert apart.token_ids.shape == (1, 32) and apart.visible is None


@settings(deadline=None)
@given(st.lists(st.integers(0, 20), max_size=12), st.integers(1, 30))
def test_parts_are_consecutive_and_within_the_limit(lengths, limit):
    parts = list(token_parts(lengths, limit))
    assert [i for part in parts for i in part] == list(range(len(lengths)))
    assert all(len(part) == 1 or sum(lengths[i] for i in part) <= limit for part in parts)
