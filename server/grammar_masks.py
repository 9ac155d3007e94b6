"""Which tokens a grammar allows next, worked out while the model computes the step.

Legend: M requests with a grammar that choose a token in this step, V vocabulary, W = ceil(V / 32).

A matcher follows one request's output. It is never sent anywhere: it is rebuilt from the grammar
and the output tokens, after a preemption or on another rank alike.
"""

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import llguidance
import numpy as np
import torch

from moed.config.engine_config import ModelConfig
from moed.server.grammar_library import (
    GrammarError,
    check_state,
    compile_grammar,
    make_vocabulary,
)
from moed.server.request import Request
from moed.server.scheduler import Schedule

MAX_COMPILED = 64
MAX_THREADS = 8


@dataclass(frozen=True)
class TokenMasks:
    """What was found for some requests."""

    requests: Sequence[Request]
    bits: torch.Tensor
    """[M, W] int32 on the CPU, the lowest bit first: 1 where a token may come."""
    ended: Sequence[bool]
    """Whose grammar is complete: nothing but an end token may come."""
    errors: Sequence[str | None]

    def error(self, request: Request) -> str | None:
        """Why nothing can be chosen for it, or None."""
        for other, error in zip(self.requests, self.errors, strict=True):
            if other is request:
                return error
        return None

    def apply(self, logits: torch.Tensor, requests: Sequence[Request]) -> None:
        """Rule out what may not come, in `logits` [R, V] float32 in place, a row each of
        `requests`.
        """
        row_of = {id(request): row for row, request in enumerate(requests)}
        places = [row_of[id(request)] for request in self.requests]
        if not places:
            return
        rows = torch.tensor(places, device=logits.device)
        allowed = unpack(self.bits, logits.device)[:, : logits.shape[1]]
        ended = torch.tensor(self.ended, device=logits.device)[:, None]
        # An end token that is all there is comes in spite of `min_tokens`.
        usable = torch.where(ended, 0.0, logits[rows])
        logits[rows] = torch.where(allowed, usable, -torch.inf)


NO_MASKS = TokenMasks((), torch.empty(0, 0, dtype=torch.int32), (), ())


def unpack(bits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """[M, 32 * W] bool on `device`."""
    if device.type == "cpu":
        flat = np.unpackbits(bits.numpy().view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(flat.view(np.bool_))
    return unpack_words(bits.to(device, non_blocking=True))


def unpack_words(words: torch.Tensor) -> torch.Tensor:
    """`unpack`, on whatever device `words` [M, W] int32 is."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> shifts) & 1).bool().flatten(1)


@dataclass
class _Progress:
    """A matcher, and how many of its request's output tokens it has seen."""

    matcher: llguidance.LLMatcher
    num_seen: int = 0


class GrammarMasks:
    """One rank's matchers. One thread does all work, without Python's lock where it counts."""

    def __init__(self, model: ModelConfig, num_threads: int) -> None:
        self._model = model
        self._num_words = (model.vocab_size + 31) // 32
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._vocabulary = self._thread.submit(make_vocabulary, model)
        self._executor = llguidance.LLExecutor(min(num_threads, MAX_THREADS))
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._progress: WeakKeyDictionary[Request, _Progress] = WeakKeyDictionary()

    def start(self, schedule: Schedule) -> "Future[TokenMasks] | None":
        """Begin with the masks of a step; None when it needs none."""
        requests = [
            scheduled.request
            for scheduled in schedule.requests
            if scheduled.request.params.grammar is not None and scheduled.chooses
        ]
        return self._thread.submit(self._compute, requests) if requests else None

    def _compute(self, requests: Sequence[Request]) -> TokenMasks:
        bits = torch.full((len(requests), self._num_words), -1, dtype=torch.int32)
        errors: list[str | None] = [None] * len(requests)
        matchers: dict[int, llguidance.LLMatcher] = {}
        for row, request in enumerate(requests):
            try:
                matchers[row] = self._follow(request)
            except GrammarError as error:
                errors[row] = _describe(error)
        if matchers:
            self._executor.unsafe_compute_mask_ptr(
                [(matcher, row) for row, matcher in matchers.items()],
                bits.data_ptr(),
                self._num_words * bits.element_size(),
                len(requests),
            )
        for row, matcher in matchers.items():
            try:
                check_state(matcher)
            except GrammarError as error:
                errors[row] = _describe(error)
        ended = [row in matchers and matchers[row].is_stopped() for row in range(len(requests))]
        return TokenMasks(tuple(requests), bits, ended, errors)

    def _follow(self, request: Request) -> llguidance.LLMatcher:
        """Its matcher, after all tokens of its output. Raises `GrammarError`."""
        progress = self._progress.get(request)
        if progress is None:
            assert request.params.grammar is not None
            progress = _Progress(self._copy(request.params.grammar))
            self._progress[request] = progress
        new = request.token_ids[request.num_prompt_tokens + progress.num_seen :]
        progress.num_seen += len(new)
        # After its end a grammar takes end tokens only, any number of them.
        if new and not progress.matcher.is_stopped():
            progress.matcher.consume_tokens(new)
        check_state(progress.matcher)
        return progress.matcher

    def _copy(self, grammar: str) -> llguidance.LLMatcher:
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = compile_grammar(self._vocabulary.result(), grammar)
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        return compiled.deep_copy()


def _describe(error: GrammarError) -> str:
    return f"the output cannot go on within the grammar that was asked for: {error}"
