import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from trainers.algorithms import DAPO, GRPO, RLOO
from trainers.loss import Counts, LossInput, aggregate, clipped_surrogate, importance_ratio, kl, segment_sum

NAN = float("nan")
MODES = ["token_mean", "turn_mean_token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum",
         "sequence_mean_token_sum_norm"]


def indices(*turn_lengths):
    """Flat sequence and turn index of sequences given by their turns' lengths."""
    sequence = [i for i, turns in enumerate(turn_lengths) for length in turns for _ in range(length)]
    turn = [t for turns in turn_lengths for t, length in enumerate(turns) for _ in range(length)]
    return torch.tensor(sequence, dtype=torch.int64), torch.tensor(turn, dtype=torch.int64)


# Aggregation

# (2+1+7)/3; (2 + (1+7)/2)/2; (2 + 8)/2
@pytest.mark.parametrize("mode, right", [("token_mean", 10 / 3), ("sequence_mean_token_mean", 3.0),
                                         ("sequence_mean_token_sum", 5.0)])
@pytest.mark.parametrize("masked", [NAN, math.inf, -math.inf, 5.0])
def test_a_masked_value_enters_neither_the_loss_nor_the_gradient(mode, right, masked):
    loss = torch.tensor([[2.0, masked], [1.0, 7.0]], requires_grad=True)
    result = aggregate(loss, torch.tensor([[1, 0], [1, 1]]), mode)
    result.backward()
    assert result.item() == pytest.approx(right)
    assert loss.grad[0, 1] == 0
    assert torch.isfinite(loss.grad).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("counts", [None, Counts(0, 0, 0), Counts(5, 2, 2)])
def test_a_fully_masked_batch_gives_zero_with_zero_gradient(mode, counts):
    loss = torch.tensor([[2.0, NAN], [1.0, 7.0]], requires_grad=True)
    result = aggregate(loss, torch.zeros(2, 2), mode, turn_index=torch.zeros(2, 2, dtype=torch.int64), counts=counts,
                       max_length=4)
    result.backward()
    assert result.item() == 0.0
    assert (loss.grad == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_a_micro_batch_without_tokens_gives_zero(mode):
    loss, index = torch.zeros(0, requires_grad=True), torch.zeros(0, dtype=torch.int64)
    result = aggregate(loss, mode=mode, sequence_index=index, turn_index=index, counts=Counts(5, 2, 2), max_length=4)
    result.backward()
    assert result.item() == 0.0


def test_an_empty_sequence_does_not_count():
    loss, mask = torch.tensor([[2.0, 4.0], [9.0, 9.0]]), torch.tensor([[1, 1], [0, 0]])
    assert aggregate(loss, mask, "sequence_mean_token_mean").item() == 3.0
    assert aggregate(loss, mask, "sequence_mean_token_sum").item() == 6.0


def test_a_truncated_sequence_is_left_out_of_the_denominator_too():
    loss = torch.ones(2, 6)
    mask = torch.zeros(2, 6)
    mask[0, :4] = 1
    assert aggregate(loss, mask).item() == 1.0  # 4 tokens of loss 1; counting the other 6 would give 0.4


def test_each_mode_means_what_its_name_says():
    # Sequence 0: turns [1, 2 | 6], sequence 1: turn [3].
    loss, (sequence, turn) = torch.tensor([1.0, 2.0, 6.0, 3.0]), indices([2, 1], [1])
    right = {"token_mean": 12 / 4, "turn_mean_token_mean": (1.5 + 6 + 3) / 3, "sequence_mean_token_mean": (3 + 3) / 2,
             "sequence_mean_token_sum": (9 + 3) / 2, "sequence_mean_token_sum_norm": (9 + 3) / 2 / 4}
    for mode, value in right.items():
        result = aggregate(loss, mode=mode, sequence_index=sequence, turn_index=turn, max_length=4)
        assert result.item() == pytest.approx(value), mode


def test_flat_and_padded_forms_agree():
    padded = torch.tensor([[1.0, 2.0, 6.0, NAN], [3.0, NAN, NAN, NAN]])
    turns = torch.tensor([[0, 0, 1, 0], [0, 0, 0, 0]])
    sequence, turn = indices([2, 1], [1])
    for mode in MODES:
        flat = aggregate(padded[~padded.isnan()], mode=mode, sequence_index=sequence, turn_index=turn, max_length=4)
        assert aggregate(padded, ~padded.isnan(), mode, turn_index=turns, max_length=4) == flat


def test_turns_may_be_numbered_within_a_sequence_or_over_the_whole_batch():
    loss, (sequence, turn) = torch.tensor([1.0, 2.0, 6.0, 3.0]), indices([2, 1], [1])
    within = aggregate(loss, mode="turn_mean_token_mean", sequence_index=sequence, turn_index=turn)
    overall = torch.tensor([70, 70, 71, 90])
    assert aggregate(loss, mode="turn_mean_token_mean", sequence_index=sequence, turn_index=overall) == within
    assert aggregate(loss, mode="turn_mean_token_mean", turn_index=overall) == within


def test_doubling_every_token_changes_sums_but_no_mean_of_means():
    loss, (sequence, turn) = torch.tensor([1.0, 2.0, 6.0, 3.0]), indices([2, 1], [1])
    longer = torch.tensor([2, 1, 3, 2])  # token repeats: unequal, so that the token mean moves
    def both(mode):
        once = aggregate(loss, mode=mode, sequence_index=sequence, turn_index=turn)
        twice = aggregate(loss.repeat_interleave(2), mode=mode, sequence_index=sequence.repeat_interleave(2),
                          turn_index=turn.repeat_interleave(2))
        return once.item(), twice.item()
    assert both("turn_mean_token_mean") == pytest.approx((3.5, 3.5))
    assert both("sequence_mean_token_mean") == pytest.approx((3.0, 3.0))
    assert both("sequence_mean_token_sum") == pytest.approx((6.0, 12.0))
    # (2·1 + 2 + 3·6 + 2·3)/8
    assert aggregate(loss.repeat_interleave(longer)).item() == pytest.approx(28 / 8)


@pytest.mark.parametrize("arguments, message", [
    ({"mode": "mean"}, "unknown aggregation 'mean'; one of token_mean"),
    ({"mode": "sequence_mean_token_mean"}, "needs sequence_index"),
    ({"mode": "turn_mean_token_mean"}, "needs turn_index"),
    ({"mode": "turn_mean_token_mean", "turn_index": torch.zeros(3, dtype=torch.int64)}, r"shape \[4\], got \[3\]"),
    ({"mode": "sequence_mean_token_sum_norm", "sequence_index": torch.zeros(4, dtype=torch.int64)}, "max_length"),
    ({"mask": torch.ones(2)}, r"mask has shape \[2\], the values \[4\]"),
])
def test_aggregate_says_what_is_missing(arguments, message):
    with pytest.raises(ValueError, match=message):
        aggregate(torch.zeros(4), **arguments)


def test_segment_sum_takes_any_numbers_as_index():
    assert segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([900, -3, 900])).tolist() == [5.0, 2.0, 5.0]


def test_counts_of_actions_and_of_the_rest():
    # 10 tokens of which 4 are of actions, in 2 of 3 turns.
    counts = Counts(tokens=10, turns=3, sequences=1, action_tokens=4, actions=2)
    assert (counts.in_actions.tokens, counts.in_actions.turns) == (4, 2)
    assert (counts.outside_actions.tokens, counts.outside_actions.turns) == (6, 3)


# However the batch is cut

def test_token_mean_does_not_depend_on_the_micro_batches():
    # A: 2 tokens of loss 1; B: 8 tokens of loss 0. Mean over 10 tokens; averaging two means would give 0.5.
    a, b, counts = torch.ones(2, requires_grad=True), torch.zeros(8, requires_grad=True), Counts(10, 2, 2)
    parts = aggregate(a, counts=counts) + aggregate(b, counts=counts)
    parts.backward()
    assert parts.item() == pytest.approx(0.2)
    assert torch.cat([a.grad, b.grad]).tolist() == pytest.approx([0.1] * 10)
    assert aggregate(torch.cat([a, b])).item() == pytest.approx(0.2)


def sgd_losses(steps):
    """Effective loss of each optimiser step, with learning rate 1 on one parameter that every token's loss equals."""
    parameter = torch.zeros(1, requires_grad=True)
    moved = []
    for micro_batches in steps:
        counts = Counts(sum(micro_batches), len(micro_batches), len(micro_batches))
        for tokens in micro_batches:
            aggregate(parameter.expand(tokens), counts=counts).backward()
        moved.append(parameter.grad.item())
        parameter.grad = None
    return moved


def test_accumulated_losses_are_divided_once():
    assert sgd_losses([[10, 10, 10, 10]]) == pytest.approx([1.0])  # 0.25 where the framework divides again
    assert sgd_losses([[40]]) == pytest.approx([1.0])
    assert sgd_losses([[10, 10], [10, 10]]) == pytest.approx([1.0, 1.0])  # 0.5 by the generation batch's tokens
    assert sgd_losses([[10, 10, 10, 10], [10, 10, 10]]) == pytest.approx([1.0, 1.0])  # a last partial mini-batch


def random_batch(generator):
    """Five trajectories of 1 to 3 turns as one flat double-precision batch, made from a parameter vector."""
    sequence, turn = indices([3, 2], [1], [4, 1, 2], [2], [5, 3])
    n = len(sequence)
    noise = lambda: torch.randn(n, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"features": torch.stack([noise() for _ in range(4)], dim=1), "behaviour_logprobs": noise() * 0.2 - 1,
            "advantages": noise(), "reference_logprobs": noise() * 0.2 - 1, "turn_index": turn,
            "trajectory_index": sequence}


def gradient(algorithm, batch, parts, counts):
    """Summed loss, gradient and metrics over micro-batches of the given trajectories."""
    parameter = torch.full((4,), 0.1, dtype=torch.float64, requires_grad=True)
    totals = {}
    for trajectories in parts:
        chosen = torch.isin(batch["trajectory_index"], torch.tensor(trajectories))
        values = {name: value[chosen] for name, value in batch.items()}
        logprobs = values.pop("features") @ parameter - 1
        loss, metrics = algorithm.loss(LossInput(
            logprobs=logprobs, entropy=logprobs.square(), action_mask=torch.ones_like(logprobs, dtype=torch.bool),
            counts=counts, **values))
        loss.backward()
        totals = {name: totals.get(name, 0.0) + value.item() for name, value in metrics.items()}
    return parameter.grad, totals


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_gradient_and_metrics_do_not_depend_on_the_micro_batches(mode, level):
    algorithm = GRPO(aggregation=mode, ratio=level, kl_coefficient=0.1, entropy_coefficient=0.1, dual_clip=3,
                     aggregation_length=9 if mode.endswith("norm") else None)
    check_all_cuts(algorithm)


@pytest.mark.parametrize("algorithm", [RLOO(), RLOO(aggregation="token_mean"), DAPO()])
def test_gradient_of_the_other_algorithms_does_not_depend_on_the_micro_batches(algorithm):
    check_all_cuts(algorithm)


def check_all_cuts(algorithm):
    batch = random_batch(torch.Generator().manual_seed(0))
    counts = Counts(tokens=23, turns=9, sequences=5)
    whole, whole_metrics = gradient(algorithm, batch, [[0, 1, 2, 3, 4]], counts)
    assert whole.norm() > 1e-3
    for parts in ([[0], [1], [2], [3], [4]], [[4, 1], [0, 3, 2]], [[0, 1, 2, 3], [4]]):
        cut, metrics = gradient(algorithm, batch, parts, counts)
        torch.testing.assert_close(cut, whole, rtol=1e-10, atol=1e-12)
        assert metrics == pytest.approx(whole_metrics, rel=1e-10)


def rank_loss(rank, folder):
    """One of two processes: its own tokens, all-reduced counts, summed loss and gradient."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    cases = {"token_mean": [([1.0], [1]), ([0.0, 0.0, 0.0], [3])],
             "sequence_mean_token_mean": [([1.0, 3.0], [1, 1]), ([5.0, 7.0], [1, 1])]}
    for mode, parts in cases.items():
        values, lengths = parts[rank]
        sequence, _ = indices(*[[length] for length in lengths])
        counts = torch.tensor([len(values), len(lengths), len(lengths)])
        dist.all_reduce(counts)
        scale = torch.ones((), requires_grad=True)
        loss = aggregate(torch.tensor(values) * scale, mode=mode, sequence_index=sequence,
                         counts=Counts(*counts.tolist()))
        loss.backward()
        result = torch.stack([loss.detach(), scale.grad])
        dist.all_reduce(result)
        if rank == 0:
            torch.save(result, f"{folder}/{mode}.pt")
    dist.destroy_process_group()


def test_two_processes_give_the_loss_and_gradient_of_one(tmp_path):
    mp.spawn(rank_loss, (str(tmp_path),), nprocs=2)
    # One token of loss 1 and three of 0: 1/4. Sequence losses 1, 3, 5, 7: 4. The losses are linear in `scale`.
    assert torch.load(tmp_path / "token_mean.pt").tolist() == pytest.approx([0.25, 0.25])
    assert torch.load(tmp_path / "sequence_mean_token_mean.pt").tolist() == pytest.approx([4.0, 4.0])


# The clipped surrogate

RATIOS = torch.tensor([1.25, 1.4, 0.7, 0.7, 1.4, 5.0, 5.0])
SIGNS = torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0, 1.0])


@pytest.mark.parametrize("dual_clip, right", [(None, [-1.25, -1.28, -0.7, 0.8, 1.4, 5.0, -1.28]),
                                              (3.0, [-1.25, -1.28, -0.7, 0.8, 1.4, 3.0, -1.28])])
def test_clips_are_asymmetric_and_the_dual_clip_is_for_negative_advantages(dual_clip, right):
    loss, clipped = clipped_surrogate(RATIOS.log(), torch.zeros(7), SIGNS, clip_low=0.2, clip_high=0.28,
                                      dual_clip=dual_clip)
    assert loss.tolist() == pytest.approx(right)
    assert clipped[1:5].float().mean() == 0.5  # (1.4, +) and (.7, −) of (1.4, +), (.7, +), (.7, −), (1.4, −)


def test_clipped_tokens_are_those_without_gradient():
    logprobs = RATIOS.log().requires_grad_()
    loss, clipped = clipped_surrogate(logprobs, torch.zeros(7), SIGNS)
    loss.sum().backward()
    assert ((logprobs.grad == 0) == clipped).all()


def test_the_first_update_has_the_policy_gradient():
    logprobs = torch.tensor([-0.5, -2.0, -7.0], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.0])
    for level in ("token", "turn", "sequence"):
        index = torch.zeros(3, dtype=torch.int64)
        loss, clipped = clipped_surrogate(logprobs, logprobs.detach(), advantages, ratio=level, sequence_index=index,
                                          turn_index=index)
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
        torch.testing.assert_close(gradient, -advantages)
        assert not clipped.any()


def test_an_infinite_range_does_not_clip():
    loss, clipped = clipped_surrogate(RATIOS.log(), torch.zeros(7), SIGNS, clip_low=math.inf, clip_high=math.inf)
    torch.testing.assert_close(loss, -RATIOS * SIGNS)
    assert not clipped.any()


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
@pytest.mark.parametrize("gap", [100.0, 1e4, math.inf])
def test_huge_log_ratios_stay_finite(level, gap):
    logprobs = torch.tensor([0.0, -gap, -1.0, -1.0], requires_grad=True)
    behaviour = torch.tensor([-gap, 0.0, -1.0, -1.2])
    sequence, turn = indices([1, 1], [1, 1])
    loss, _ = clipped_surrogate(logprobs, behaviour, torch.tensor([-1.0, 1.0, 1.0, -1.0]), ratio=level,
                                sequence_index=sequence, turn_index=turn)
    loss.sum().backward()
    assert torch.isfinite(loss).all()
    assert torch.isfinite(logprobs.grad).all()


def test_ratios_of_turns_and_sequences_are_geometric_means():
    # Sequence 0: turns (2, 8 | 1); sequence 1: turn (0.5).
    logprobs, (sequence, turn) = torch.tensor([2.0, 8.0, 1.0, 0.5]).log(), indices([2, 1], [1])
    ratio = lambda level: importance_ratio(logprobs, torch.zeros(4), level, sequence_index=sequence,  # noqa: E731
                                           turn_index=turn).tolist()
    assert ratio("token") == pytest.approx([2, 8, 1, 0.5])
    assert ratio("turn") == pytest.approx([4, 4, 1, 0.5])  # √(2·8)
    assert ratio("sequence") == pytest.approx([16 ** (1 / 3)] * 3 + [0.5])


def test_the_sequence_ratio_has_gspo_s_gradient():
    # GSPO's objective for one sequence of three tokens with advantage A: A s, s = exp(mean log-ratio).
    logprobs = torch.tensor([-1.0, -1.1, -0.9], dtype=torch.float64, requires_grad=True)
    behaviour, advantage = torch.full((3,), -1.05, dtype=torch.float64), 0.7
    index = torch.zeros(3, dtype=torch.int64)
    loss, _ = clipped_surrogate(logprobs, behaviour, torch.full((3,), advantage, dtype=torch.float64),
                                ratio="sequence", sequence_index=index)
    (ours,) = torch.autograd.grad(aggregate(loss, mode="sequence_mean_token_mean", sequence_index=index), logprobs)
    (right,) = torch.autograd.grad(-advantage * (logprobs - behaviour).mean().exp(), logprobs)
    torch.testing.assert_close(ours, right)


@pytest.mark.parametrize("level", ["token", "turn", "sequence"])
def test_a_masked_token_enters_no_ratio(level):
    logprobs = torch.tensor([[-1.0, NAN, -2.0], [-1.0, -1.0, 0.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.1, -1.0, -1.9], [-1.0, -1.0, NAN]])
    advantages, mask = torch.tensor([[1.0, 1.0, 1.0], [-1.0, -1.0, NAN]]), torch.tensor([[1, 0, 1], [1, 1, 0]])
    turns = torch.zeros(2, 3, dtype=torch.int64)
    loss, clipped = clipped_surrogate(logprobs, behaviour, advantages, ratio=level, mask=mask, turn_index=turns)
    aggregate(loss, mask).backward()
    assert loss[0, 1] == loss[1, 2] == 0
    assert not clipped[mask == 0].any()
    assert torch.isfinite(logprobs.grad).all()
    assert (logprobs.grad[mask == 0] == 0).all()
    if level != "token":  # exp((0.1 − 0.1)/2) = 1 in the first row
        assert loss[0, [0, 2]].tolist() == pytest.approx([-1.0, -1.0])


@pytest.mark.parametrize("arguments, message", [({"ratio": "word"}, "unknown ratio 'word'; one of token, turn"),
                                                ({"ratio": "turn"}, "needs turn_index"),
                                                ({"dual_clip": 1.0}, "dual_clip must be greater than 1")])
def test_the_surrogate_says_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        clipped_surrogate(torch.zeros(2), torch.zeros(2), torch.zeros(2), **arguments)


# KL

def test_kl_estimates_have_the_right_sign_and_size():
    policy, reference = torch.tensor([0.5, 0.25]).log(), torch.tensor([0.25, 0.5]).log()
    assert kl(policy, reference, "k1").tolist() == pytest.approx([math.log(2), -math.log(2)])
    assert kl(policy, reference, "k2").tolist() == pytest.approx([math.log(2) ** 2 / 2] * 2)
    # 1/2 − 1 + log 2 and 2 − 1 − log 2
    assert kl(policy, reference, "k3").tolist() == pytest.approx([math.log(2) - 0.5, 1 - math.log(2)])


# E[k2] = (log² 2 + log² (2/3)) / 4
@pytest.mark.parametrize("estimator, value, slope", [("k1", 0.14384, 0.0), ("k2", 0.16121, 0.27465),
                                                     ("k3", 0.14384, 0.25)])
def test_kl_estimates_have_the_documented_expectation_and_gradient(estimator, value, slope):
    # p = (.5, .5), reference (.25, .75): KL = .14384, dKL/dlogit_1 = .27465. The sampling weights carry no gradient.
    logits = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    logprobs = logits.log_softmax(0)
    estimate = (torch.tensor([0.5, 0.5]) * kl(logprobs, torch.tensor([0.25, 0.75]).double().log(), estimator)).sum()
    estimate.backward()
    assert estimate.item() == pytest.approx(value, abs=1e-5)
    assert logits.grad[0].item() == pytest.approx(slope, abs=1e-5)


def test_kl_of_a_policy_with_itself_is_exactly_zero():
    logprobs = torch.tensor([-0.3, -5.0, -80.0])
    for estimator in ("k1", "k2", "k3"):
        assert (kl(logprobs, logprobs, estimator) == 0).all()


def test_k3_is_never_negative_and_always_finite():
    difference = torch.cat([torch.linspace(-1e-3, 1e-3, 101), torch.tensor([-1e4, -100, 100, 1e4])])
    values = kl(difference, torch.zeros_like(difference), "k3")
    assert torch.isfinite(values).all()
    assert (values >= 0).all()


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; one of k1, k2, k3"):
        kl(torch.zeros(1), torch.zeros(1), "k4")
