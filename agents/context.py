"""From a conversation to token ids, by appending: what was sampled stays as it was sampled.

The model's own chat template says what stands between a response and the next one. Where it would rewrite what came
before (thinking dropped from earlier turns, say), the next prompt is rendered anew and the break is counted; the
training rows then split there by themselves, since a row goes on only where a prompt extends what the last one became.
"""

from collections.abc import Collection, Sequence
from functools import lru_cache

import numpy as np
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

Message = dict[str, str]

_RESPONSE = "<think>α</think> ω"
_OBSERVATION = " ψ "


class ChatTemplate:
    """Renders conversations with a tokenizer's chat template; plain text, line by line, where it has none."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]):
        """`end_ids`: every token that ends a response."""
        self.tokenizer, self.end_ids = tokenizer, end_ids
        self.plain = not tokenizer.chat_template
        self._folds_system = not self.plain and not self._knows_system_role()
        self._encode_cached = lru_cache(maxsize=4096)(self._encode)
        self._opening_cached = lru_cache(maxsize=4096)(self._opening)  # the episodes of a group begin alike
        self._between = None if self.plain else self._fixed_text_between_turns()
        self._lacks_bos = self._tokenizer_adds_bos() \
            and tokenizer.bos_token_id not in self._encode(self.render([{"role": "user", "content": "υ"}]))
        self._end_id = self._end_of_response()

    def __reduce__(self) -> tuple:
        return ChatTemplate, (self.tokenizer, self.end_ids)  # without what is cached

    @property
    def closing(self) -> str:
        """The text between the last message of a prompt and the response."""
        return "\n" if self.plain else self.render([{"role": "user", "content": "υ"}]).rpartition("υ")[2]

    def render(self, messages: Sequence[Message]) -> str:
        """The text whose continuation is the next response."""
        if self.plain:
            return "".join(message["content"] + "\n" for message in messages)
        messages = list(messages)
        if self._folds_system and messages[0]["role"] == "system":
            first = messages[0]["content"] + "\n\n" + messages[1]["content"]
            messages = [{"role": "user", "content": first}, *messages[2:]]
        return self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Ids of the first prompt, with exactly one beginning-of-text token where the tokenizer wants one."""
        return list(self._opening_cached(tuple((message["role"], message["content"]) for message in messages)))

    def _opening(self, messages: tuple[tuple[str, str], ...]) -> list[int]:
        ids = self._encode(self.render([{"role": role, "content": content} for role, content in messages]))
        return [self.tokenizer.bos_token_id, *ids] if self._lacks_bos else ids

    def extension(self, messages: Sequence[Message]) -> str | None:
        """The text between a response and the next one; None where the template rewrites what came before.

        `messages` end with the response and the observation.
        """
        response, observation = (message["content"] for message in messages[-2:])
        if self.plain:
            return "\n" + observation + "\n"
        if self._between is not None:
            head, tail, strip = self._between
            return head + (observation.strip() if strip else observation) + tail
        before, text = self.render(messages[:-2]), self.render(messages)
        for kept in (response, response.strip(), response.lstrip(), response.rstrip()):
            if text.startswith(before + kept):
                return text[len(before + kept):]
        return None

    def extension_ids(self, text: str, last_id: int | None) -> list[int]:
        """Ids of a between-turns text, without the end token that the response already ends with."""
        ids = self._encode_cached(text)
        return ids[1:] if last_id in self.end_ids and ids[:1] == [last_id] else ids

    def response_ids(self, text: str) -> np.ndarray:
        """Ids of a response as a model would write it, end token included. # int64 [response_length]"""
        end = [] if self._end_id is None else [self._end_id]
        return np.array(self._encode(text) + end, dtype=np.int64)

    def _encode(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def _tokenizer_adds_bos(self) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer("a").input_ids[:1] == [bos]

    def _end_of_response(self) -> int | None:
        """The end token that the template writes behind a response (not always the tokenizer's)."""
        if not self.plain:
            text = self.render([{"role": "user", "content": "υ"}, {"role": "assistant", "content": "ω"},
                                {"role": "user", "content": "υ"}])
            after = self._encode(text.partition("ω")[2])
            if after and after[0] in self.end_ids:
                return after[0]
        return self.tokenizer.eos_token_id

    def _knows_system_role(self) -> bool:
        probe = [{"role": "system", "content": "σ"}, {"role": "user", "content": "υ"}]
        try:
            return "σ" in self.tokenizer.apply_chat_template(probe, tokenize=False)
        except TemplateError:  # what templates raise on a role they refuse
            return False

    def _fixed_text_between_turns(self) -> tuple[str, str, bool] | None:
        """(text before, text after, whether it strips) of every observation, if the template treats all turns alike and
        keeps thinking; probed on a conversation of three turns."""
        messages: list[Message] = [{"role": "system", "content": "σ"}, {"role": "user", "content": "υ"}]
        text, betweens = self.render(messages), []
        for _ in range(2):
            messages += [{"role": "assistant", "content": _RESPONSE}, {"role": "user", "content": _OBSERVATION}]
            before, text = text + _RESPONSE, self.render(messages)
            if not text.startswith(before):
                return None
            betweens.append(text[len(before):])
        strip = _OBSERVATION not in betweens[0]
        parts = betweens[0].split(_OBSERVATION.strip() if strip else _OBSERVATION)
        if betweens[0] != betweens[1] or len(parts) != 2:
            return None
        return parts[0], parts[1], strip


class Context:
    """The prompt of one episode, turn by turn.

    Without a window the whole episode is one growing conversation; with one, each turn has a prompt of its own that
    holds the first observation and the last `window` turns.
    """

    def __init__(self, template: ChatTemplate, system_prompt: str, observation: str, window: int | None = None):
        if window is not None and window < 1:
            raise ValueError(f"a window holds at least the last turn: window must be 1 or more, got {window}")
        self._template, self._window = template, window
        self._opening: list[Message] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._history: list[Message] = [{"role": "user", "content": observation}]
        self.breaks = 0
        """Turns at which the template rewrote the history."""
        self._start()

    @property
    def prompt_ids(self) -> np.ndarray:
        """What the engine reads next. # int64 [prompt_length]"""
        return np.array(self._ids, dtype=np.int64)

    def add(self, response_ids: np.ndarray, response: str, observation: str) -> None:
        """Take in a response, as sampled and as text, and what the environment answered."""
        self._history += [{"role": "assistant", "content": response}, {"role": "user", "content": observation}]
        if self._window is not None:
            self._history = [self._history[0], *self._history[1:][-2 * self._window:]]
            self._start()
            return
        between = self._template.extension(self._opening + self._history)
        if between is None:
            self.breaks += 1
            self._start()
            return
        self._ids += response_ids.tolist()
        self._ids += self._template.extension_ids(between, int(response_ids[-1]) if len(response_ids) else None)

    def _start(self) -> None:
        self._ids = self._template.opening(self._opening + self._history)
