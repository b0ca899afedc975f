"""The default engine: transformers in this process, on any machine, batching requests as they come.

Each decoding step takes one token for every running request; finished ones leave at once and waiting ones join, so no
token is spent on an episode that is over. The keys and values of an episode stay until its next turn, whose prompt is
then read only from where it differs.
"""

import asyncio
import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

import numpy as np
import torch

from agents.engine import Completion, Request
from agents.models import ModelError, Policy
from agents.scoring import attention_masks, check_model, head_logits, score_sequences
from agents.slot_cache import SlotCache

JOIN_SHARE = 8
"""Waiting requests join when they are at least one in so many of the running ones: a prefill has a fixed cost."""
JOIN_TOKENS = 32768
"""Prompt tokens read in one pass, filler included (or one longer prompt): a bound on memory."""
WORTH_WAITING = 8
"""Prompt tokens that a request must save to wait a round for them."""
DONORS = 64
"""Rows remembered as beginnings for others."""


@dataclass(eq=False)
class _Job:
    """A request, and what is sampled for it so far."""

    request: Request
    answer: asyncio.Future
    response: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    changes: list[tuple[int, int]] = field(default_factory=list)
    """Weight versions that were replaced while it ran, and how many ids were sampled by then."""

    def known(self) -> list[int]:
        return [*self.request.prompt_ids.tolist(), *self.response]


@dataclass(eq=False)
class _Slot:
    """One row of the cache: an episode's tokens, and its job while one is running."""

    row: int
    """Where it stands; rows are swapped so that the running ones come first."""
    episode: str = ""
    cached: list[int] = field(default_factory=list)
    """The ids whose keys and values the row holds."""
    job: _Job | None = None
    stale: bool = False
    """Some of its keys and values are of older weights."""


class TransformersEngine:
    """Engine over a `Policy` that it may share with a learner (then `load` copies nothing)."""

    replica_count = 1

    def __init__(self, policy: Policy, *, slots: int = 256, max_context: int | None = None, keep_cache: bool = True):
        """`slots`: episodes held at once. `max_context`: prompt and response tokens, at most the model's own.
        `keep_cache`: a response under way at `load` goes on with the keys and values of the older weights, else they
        are computed anew."""
        self.policy, self._keep_cache = policy, keep_cache
        self.weight_version = 0
        self.max_context = min(max_context or policy.max_context, policy.max_context)
        self.sampled_tokens = 0
        self.prefilled_tokens = 0
        self._check_layers()
        check_model(policy.model)
        self._slots = [_Slot(row) for row in range(slots)]
        self._cache = self._new_cache()
        self._running = 0
        self._idle = dict.fromkeys(self._slots)
        """The rows behind the running ones, the one idle longest first."""
        self._held: dict[str, _Slot] = {}
        """Idle rows by their episode."""
        self._donors: deque[_Slot] = deque(maxlen=DONORS)
        self._waiting: deque[_Job] = deque()
        self._unanswered: set[asyncio.Future] = set()
        self._loop: asyncio.Task | None = None
        self._end_ids = policy.end_ids
        self._stop_ids: dict[tuple[str, ...], frozenset[int]] = {}

    async def generate(self, request: Request) -> Completion:
        if len(request.prompt_ids) == 0:
            raise ValueError("a request needs at least one prompt token")
        known = self.policy.model.get_input_embeddings().num_embeddings
        if not 0 <= request.prompt_ids.min() <= request.prompt_ids.max() < known:
            raise ValueError(f"a prompt holds token ids outside the model's {known}: is the tokenizer another model's?")
        if not request.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {request.temperature}")
        if len(request.prompt_ids) >= self.max_context or request.max_new_tokens < 1:
            return Completion(response_ids=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32),
                              finish_reason="length", weight_version=self.weight_version)
        answer = asyncio.get_running_loop().create_future()
        self._unanswered.add(answer)
        answer.add_done_callback(self._unanswered.discard)
        self._waiting.append(_Job(request, answer))
        if self._loop is None or self._loop.done():
            self._loop = asyncio.create_task(self._run())
        return await answer

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        own = self.policy.model.state_dict()
        if unknown := [name for name in weights if name not in own]:
            raise ValueError(f"weights that the engine's model lacks: {', '.join(unknown[:3])}")
        with torch.no_grad():
            for name, tensor in weights.items():
                if tensor.data_ptr() != own[name].data_ptr():
                    own[name].copy_(tensor)
        for job in (*self._waiting, *(slot.job for slot in self._slots[:self._running])):
            if job.response:
                job.changes.append((self.weight_version, len(job.response)))
        if not self._keep_cache:
            self._waiting.extendleft(slot.job for slot in self._slots[:self._running])
            self._running = 0
        self.weight_version = version
        self._forget()

    def score(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        with self.policy.precision():
            return score_sequences(self.policy.model, sequences, temperature)

    def sleep(self) -> None:
        """Its weights are the learner's, and its cache is small."""

    def close(self) -> None:
        """Nothing was started."""

    async def _run(self) -> None:
        try:
            while self._waiting or self._running:
                self._drop_cancelled()
                if self._waiting and self._running < len(self._slots) \
                        and len(self._waiting) * JOIN_SHARE >= self._running:
                    self._join()
                else:
                    self._advance(0, self._running, [1] * self._running)
                await asyncio.sleep(0)
        except asyncio.CancelledError as error:
            self._fail(error)
            raise
        except Exception as error:
            self._fail(error)

    def _fail(self, cause: BaseException) -> None:
        # Every episode that waits hears of it through its own answer; the next request starts afresh.
        for answer in [answer for answer in self._unanswered if not answer.done()]:
            failure = RuntimeError(f"the engine failed: {type(cause).__name__}: {cause}")
            failure.__cause__ = cause
            answer.set_exception(failure)
        self._waiting.clear()
        self._running = 0
        self._cache = self._new_cache()  # it may hold NaN, which would reach other rows even through a mask
        self._forget()

    def _forget(self) -> None:
        """Drop what the rows remember; the running ones go on as they are."""
        for slot in self._slots[:self._running]:
            slot.stale = True
        for slot in self._slots[self._running:]:
            slot.episode, slot.cached, slot.job = "", [], None
        self._idle = dict.fromkeys(self._slots[self._running:])
        self._held.clear()
        self._donors.clear()

    def _drop_cancelled(self) -> None:
        self._waiting = deque(job for job in self._waiting if not job.answer.done())
        for index in reversed(range(self._running)):
            if self._slots[index].job.answer.done():
                self._retire(index)

    def _join(self) -> None:
        """Give waiting requests rows right behind the running ones and read their prompts.

        A prompt that begins as one that was read before starts from a copy of those keys and values. Where it begins as
        one that joins only now, it waits for the next round instead: a group's common prompt is read once.
        """
        # In the order of their rows: those idle since the last steps then stand where they are needed, unmoved.
        self._waiting = deque(sorted(self._waiting, key=lambda job: self._row_held(job.request.episode)))
        first, later, news = self._running, [], []
        read = sorted(((slot.cached, slot) for slot in set(self._donors)), key=itemgetter(0))
        joining: list[tuple[list[int], _Slot]] = []
        while self._waiting and self._idle:
            job = self._waiting[0]
            prompt, episode = job.known(), job.request.episode
            held = self._held.get(episode)
            own = _common_prefix(held.cached, prompt) if held else 0
            donor, shared = _closest(read, prompt)
            if _closest(joining, prompt)[1] > max(own, shared) + WORTH_WAITING:
                later.append(self._waiting.popleft())
                continue
            cached = min(max(own, shared), len(prompt) - 1)
            new = len(prompt) - cached
            if news and (len(news) + 1) * max(*news, new) > JOIN_TOKENS:
                break
            self._waiting.popleft()
            news.append(new)
            slot = self._next_row(episode)
            if shared > own:
                self._cache.copy(donor.row, self._running, cached)
            slot.episode, slot.cached, slot.job, slot.stale = episode, prompt[:cached], job, False
            self._running += 1
            insort(joining, (prompt, slot), key=itemgetter(0))
            read = [entry for entry in read if entry[1] is not slot]
        self._waiting.extendleft(reversed(later))
        self.prefilled_tokens += sum(news)
        self._donors.extend(slot for slot, new in zip(self._slots[first:self._running], news) if new > WORTH_WAITING)
        self._advance(first, self._running, news)

    def _next_row(self, episode: str) -> _Slot:
        """The idle row that holds this episode, else the one idle longest, put right behind the running ones."""
        slot = self._held.get(episode) or next(iter(self._idle))
        del self._idle[slot]
        self._held.pop(slot.episode, None)
        self._swap(slot.row, self._running)
        return slot

    def _row_held(self, episode: str) -> int:
        """The idle row that holds this episode; one past the last where none does."""
        return self._held[episode].row if episode in self._held else len(self._slots)

    @torch.no_grad()
    def _advance(self, first: int, end: int, news: list[int]) -> None:
        """Read each row's `news` unread tokens and sample one more for each."""
        slots = self._slots[first:end]
        width = max(news)
        ids = np.zeros((len(slots), width), np.int64)
        for row, (slot, new) in enumerate(zip(slots, news)):
            ids[row, :new] = slot.job.response[-1:] if new == 1 and slot.job.response else \
                slot.job.known()[len(slot.cached):]
            # Behind a row's own tokens stands filler, written where the row's next tokens will overwrite it.
        starts = np.array([len(slot.cached) for slot in slots])
        for row, (slot, new) in enumerate(zip(slots, news)):
            slot.cached.extend(ids[row, :new].tolist())
        device = self.policy.device
        positions = torch.from_numpy(starts[:, None] + np.arange(width)).to(device)
        self._cache.place(first, positions, int(starts.max()) + width)
        known = positions.clamp(max=self.policy.max_context - 1)
        masks = attention_masks(self.policy.model, self._cache.attention_mask)
        last = torch.from_numpy(np.array(news) - 1).to(device)
        with self.policy.precision():
            hidden = self.policy.model.base_model(
                input_ids=torch.from_numpy(ids).to(device), position_ids=known, attention_mask=masks,
                past_key_values=self._cache, use_cache=True).last_hidden_state
            logits = head_logits(self.policy.model, hidden[torch.arange(len(slots), device=device), last])
        jobs = [slot.job for slot in slots]
        self._take(first, jobs, *sample(logits, [job.request.temperature for job in jobs],
                                        [job.request.seed for job in jobs], [len(job.response) for job in jobs]))

    def _take(self, first: int, jobs: list[_Job], ids: list[int], logprobs: list[float]) -> None:
        self.sampled_tokens += len(jobs)
        finished = []
        for index, (job, token, logprob) in enumerate(zip(jobs, ids, logprobs)):
            if math.isnan(logprob):
                raise FloatingPointError("the model's logits are NaN; look at its weights and dtype")
            job.response.append(token)
            job.logprobs.append(logprob)
            if reason := self._finish_reason(job, token):
                finished.append(first + index)
                if not job.answer.done():
                    spans = _spans([*job.changes, (self.weight_version, len(job.response))])
                    job.answer.set_result(Completion(
                        response_ids=np.array(job.response, np.int64), logprobs=np.array(job.logprobs, np.float32),
                        finish_reason=reason, weight_version=spans[0][0],
                        weight_versions=spans if len(spans) > 1 else ()))
        for index in reversed(finished):
            self._retire(index)

    def _finish_reason(self, job: _Job, token: int) -> str:
        request, response = job.request, job.response
        if token in self._end_ids:
            return "stop"
        if request.stop and token in self._ids_ending(request.stop):
            longest = max(len(stop.encode()) for stop in request.stop)  # in tokens it is at most that, and a space
            tail = self.policy.tokenizer.decode(response[-longest - 1:])
            if any(stop in tail for stop in request.stop):
                return "stop"
        full = len(request.prompt_ids) + len(response) >= self.max_context
        return "length" if full or len(response) >= request.max_new_tokens else ""

    def _ids_ending(self, stop: tuple[str, ...]) -> frozenset[int]:
        """The tokens that can complete a stop text: only after these is text decoded."""
        if stop not in self._stop_ids:
            # A token may hold only the last byte of a character, and loses its leading space where it comes first.
            last = {text[-1] for text in stop} | {"\N{REPLACEMENT CHARACTER}"}
            tokenizer = self.policy.tokenizer
            texts = tokenizer.batch_decode([[i, i] for i in range(len(tokenizer))])
            self._stop_ids[stop] = frozenset(i for i, text in enumerate(texts) if last & set(text))
        return self._stop_ids[stop]

    def _retire(self, index: int) -> None:
        """End the job in this row; the row keeps its tokens for the episode's next turn."""
        slot = self._slots[index]
        slot.job = None
        self._running -= 1
        self._swap(index, self._running)
        self._idle[slot] = None
        if slot.stale:
            slot.cached = []
        elif slot.episode:
            self._held[slot.episode] = slot

    def _swap(self, a: int, b: int) -> None:
        self._cache.swap(a, b, max(len(self._slots[a].cached), len(self._slots[b].cached)))
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]
        self._slots[a].row, self._slots[b].row = a, b

    def _new_cache(self) -> SlotCache:
        return SlotCache(self.policy.model.config.get_text_config().num_hidden_layers, len(self._slots))

    def _check_layers(self) -> None:
        config = self.policy.model.config
        kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
        if odd := kinds - {"full_attention", "sliding_attention"}:
            raise ModelError(f"{type(self.policy.model).__name__} has {', '.join(sorted(odd))} layers, which this "
                             "engine cannot cache")
        if config._attn_implementation not in ("sdpa", "eager"):
            raise ModelError(f"this engine needs attention masks, which {config._attn_implementation!r} attention does "
                             "not take: load the model with 'sdpa' or 'eager'")


def sample(logits: torch.Tensor, temperatures: Sequence[float], seeds: Sequence[int],
           steps: Sequence[int]) -> tuple[list[int], list[float]]:
    """One token a row by inverse transform, with a uniform number that depends on the row's seed and step alone.

    Temperature 0 takes the likeliest token and reports its log-probability at temperature 1.
    # logits [rows, vocabulary]
    """
    heat = torch.tensor(temperatures, device=logits.device)
    greedy = heat == 0
    logprobs = (logits / torch.where(greedy, 1.0, heat)[:, None]).log_softmax(-1)
    cumulative = logprobs.double().exp().cumsum(-1)
    uniform = torch.from_numpy(uniform_numbers(seeds, steps)).to(logits.device)
    ids = torch.searchsorted(cumulative, (uniform * cumulative[:, -1])[:, None], right=True)[:, 0]
    ids = torch.where(greedy, logits.argmax(-1), ids.clamp(max=logits.shape[-1] - 1))
    return ids.tolist(), logprobs.gather(-1, ids[:, None])[:, 0].tolist()


def uniform_numbers(seeds: Sequence[int], steps: Sequence[int]) -> np.ndarray:
    """Numbers in [0, 1) from a counter-based generator (splitmix64 of seed and step). # float64 [rows]"""
    with np.errstate(over="ignore"):
        x = np.array([s & (2**64 - 1) for s in seeds], np.uint64)
        for add in (np.uint64(0), np.array(steps, np.uint64)):
            x = (x ^ add) + np.uint64(0x9E3779B97F4A7C15)
            x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            x ^= x >> np.uint64(31)
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _spans(changes: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Versions and the index that each one's ids end before, without those that sampled none."""
    starts = [0, *(end for _, end in changes)]
    return tuple((version, end) for (version, end), start in zip(changes, starts) if end > start)


def _closest(known: list[tuple[list[int], _Slot]], prompt: list[int]) -> tuple[_Slot | None, int]:
    """The row whose ids begin most like the prompt, and how many agree; by order, it is next to the prompt's place."""
    at = bisect_left(known, prompt, key=itemgetter(0))
    near = [(slot, _common_prefix(ids, prompt)) for ids, slot in known[max(at - 1, 0):at + 1]]
    return max(near, key=itemgetter(1), default=(None, 0))


def _common_prefix(a: list[int], b: list[int]) -> int:
    lengths = range(1, min(len(a), len(b)) + 1)
    return bisect_left(lengths, True, key=lambda n: a[:n] != b[:n])
