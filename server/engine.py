"""One rank's engine: everything that it needs, built in order, then the loop."""

import logging
import time

import torch

from moed.config.engine_config import EngineConfig
from moed.config.errors import ModelError
from moed.config.graphs import graph_shapes
from moed.config.kv_layout import kv_layout
from moed.config.weight_bytes import weight_bytes
from moed.config.windows import layers_with_own_blocks
from moed.dist.agreement import Agreement, RankState, gather_ints
from moed.dist.all2all.base import All2AllBackend
from moed.dist.groups import Groups
from moed.dist.registry import create_backend
from moed.dist.selfcheck import check_backend
from moed.moe.attention_choice import keep_attention
from moed.moe.kv_cache import (
    KVCache,
    LatentCache,
    local_kv_heads,
    make_kv_cache,
)
from moed.moe.model import Decoder, load_model
from moed.server.block_manager import BlockManager
from moed.server.engine_loop import Channel, EngineLoop
from moed.server.expert_reports import ExpertReports
from moed.server.faults import Faults
from moed.server.grammar_masks import NO_MASKS, GrammarMasks
from moed.server.graph_inputs import GraphInputs
from moed.server.graph_runner import GraphRunner
from moed.server.graphs import recorder_for
from moed.server.heartbeats import Heartbeat
from moed.server.kv_sizing import MIB, decide_max_model_len, own_num_blocks
from moed.server.member_loop import MemberLoop, run_warm_up
from moed.server.messages import AddRequest, RankProgress, RankReady, SamplingParams
from moed.server.model_runner import ModelRunner, Runner
from moed.server.part_times import PartSamples
from moed.server.sampler import sample
from moed.server.scheduler import Scheduler
from moed.server.step_plan import StepPlan, StepPlans
from moed.server.watched import WatchedAgreement, WatchedBackend
from moed.server.window_blocks import WindowBlocks

logger = logging.getLogger(__name__)

# Rows of the warm-up step: enough that, with any router, some travel to other ranks.
MAX_WARM_UP_TOKENS = 16
WARM_UP_STEP_ID = 0


class Engine:
    """`start`, then `run`, on every rank of the group."""

    def __init__(
        self, config: EngineConfig, groups: Groups, channel: Channel, heartbeat: Heartbeat | None
    ) -> None:
        """`heartbeat`: where a watchdog looks; None: there is none."""
        self._config = config
        self._heartbeat = heartbeat
        self._groups = groups
        self._channel = channel
        self._device = groups.compute_device
        self._faults = Faults(config.fault_injection, groups.rank, groups.epoch)
        self._grammars: GrammarMasks | None = None
        self._backend: All2AllBackend | None = None
        self._loop: EngineLoop | MemberLoop | None = None
        self._plans = StepPlans(groups, self._device)
        # What outlives the group.
        self._model: Decoder | None = None
        self._kv_cache: KVCache | LatentCache | None = None
        self._num_kept_blocks = 0

    def start(self, startup_s: dict[str, float]) -> None:
        """Load, size, warm up, and send `RankReady` with `startup_s` and the phases from here on.

        Raises `ConfigError`, `ModelError` or `PeerLost`.
        """
        load_started = time.monotonic()
        model = self._load()
        kv_started = time.monotonic()
        kv_cache, blocks, max_model_len = self._size_kv_cache()
        block_size = self._config.cache.block_size
        eager = ModelRunner(
            model,
            kv_cache,
            block_size,
            self._device,
            has_window_blocks=blocks.window_blocks is not None,
        )
        agreement = self._agreement()
        self._progress("warming up")
        if self._groups.tensor_rank:
            run_warm_up(self._plans, eager, agreement)
        else:
            self._warm_up(eager, agreement, blocks, max_model_len)
        runner = self._with_graphs(eager, model, blocks, max_model_len)
        reports = self._expert_reports(model)
        if self._groups.tensor_rank:
            self._loop = MemberLoop(
                self._plans, runner, agreement, self._channel, self._faults, reports
            )
        else:
            self._loop = EngineLoop(
                rank=self._groups.data_parallel_rank,
                scheduler=self._scheduler(blocks, max_model_len),
                blocks=blocks,
                runner=runner,
                plans=self._plans,
                agreement=agreement,
                channel=self._channel,
                faults=self._faults,
                grammars=self._grammar_masks(),
                expert_reports=reports,
                part_samples=PartSamples(self._device),
                first_step_id=WARM_UP_STEP_ID + 1,
                step_ahead=self._config.runner.step_ahead,
            )
        phases = {"load": kv_started - load_started, "warm_up": time.monotonic() - kv_started}
        self._channel.send(
            RankReady(
                rank=self._groups.rank,
                num_kv_blocks=blocks.num_blocks,
                block_size=block_size,
                max_model_len=max_model_len,
                startup_s={**startup_s, **phases},
                memory_bytes={
                    "weights": sum(weight_bytes(self._config).values()),
                    "kv_cache": kv_layout(self._config).num_bytes(blocks.num_blocks),
                },
            )
        )

    def leave(self) -> None:
        """Let go of the group, which has failed or been aborted; weights and KV cache stay."""
        self._backend = self._loop = None

    def rejoin(self, groups: Groups, channel: Channel, startup_s: dict[str, float]) -> None:
        """As `start`, in a new group, with the weights and the KV cache of before and no request.
        Call `leave` first.
        """
        self._groups, self._channel = groups, channel
        self._plans = StepPlans(groups, self._device)
        self._faults.on_rejoin()
        self.start(startup_s)

    def run(self) -> None:
        """Serve until all ranks agree to stop; `start` must have returned. Raises what goes wrong
        in a step.
        """
        assert self._loop is not None
        self._loop.run()
        # Only together, after an orderly end: a buffer may wait for peers that are gone otherwise.
        if self._backend is not None:
            self._backend.close()

    def _agreement(self) -> Agreement:
        """Collective."""
        if self._heartbeat is not None:
            return WatchedAgreement(self._groups, self._config, self._heartbeat)
        return Agreement(self._groups, self._config.parallel, self._config.digest())

    def _grammar_masks(self) -> GrammarMasks:
        """Made once: it has a thread and compiled grammars, and of requests only what it can
        rebuild.
        """
        if self._grammars is None:
            self._grammars = GrammarMasks(self._config.model, self._config.parallel.num_threads)
        return self._grammars

    def _load(self) -> Decoder:
        """The dispatch backend, checked with known rows, and the model with this rank's experts."""
        config = self._config
        self._progress(f"checking backend {config.parallel.backend.name}")
        placement = config.placement()
        self._backend = create_backend(
            config.parallel.backend.name,
            self._groups,
            placement,
            config.fused_moe,
            getattr(torch, config.model.dtype),
            self._device,
        )
        check_backend(self._backend, self._groups, config, placement)
        if self._heartbeat is not None:
            self._backend = WatchedBackend(self._backend, self._heartbeat)
        if self._model is not None:
            self._progress("waiting for the ranks that load the model")
            self._model.join(self._groups, self._backend)
            keep_attention(config, self._model.attention, self._groups)
            return self._model
        self._progress("loading the model")
        self._faults.on_load()
        self._model = load_model(config, self._groups, self._backend, self._progress)
        return self._model

    def _size_kv_cache(self) -> tuple[KVCache | LatentCache, BlockManager, int]:
        """The cache, its blocks, and L: agreed, since every rank takes the smallest number."""
        config, block_size = self._config, self._config.cache.block_size
        dtype = getattr(torch, config.model.dtype)
        kv_heads = local_kv_heads(config.model, config.parallel.tensor_parallel_size)
        layout = kv_layout(config)
        own = self._num_kept_blocks
        if self._kv_cache is None:
            own = self._faults.kv_blocks(own_num_blocks(config, layout, self._device))
        num_blocks = min(gather_ints(self._groups, own))
        num_window_blocks = layout.num_window_blocks(num_blocks)
        max_model_len = decide_max_model_len(config, num_blocks, layout)
        logger.info(
            "KV cache: %d blocks of %d tokens (%.1f MiB)%s; at most %d tokens per request",
            num_blocks,
            block_size,
            layout.num_bytes(num_blocks) / MIB,
            "" if num_blocks == own else f", the least of all ranks, not {own}",
            max_model_len,
        )
        # One more block than requests may hold, where graphs put what only fills them up.
        num_scrap = int(bool(config.runner.graph_buckets))
        kv_cache = self._kv_cache
        if kv_cache is None:
            kv_cache = make_kv_cache(
                config.model,
                kv_heads,
                num_blocks + num_scrap,
                num_window_blocks + num_scrap,
                block_size,
                dtype,
                self._device,
            )
        self._kv_cache, self._num_kept_blocks = kv_cache, num_blocks
        windows, window_blocks = layers_with_own_blocks(config.model), None
        if windows is not None:
            window_blocks = WindowBlocks(num_window_blocks, windows.window, block_size)
        shares = self._config.cache.enable_prefix_caching
        manager = BlockManager(
            num_blocks, block_size, shares_prefixes=shares, window_blocks=window_blocks
        )
        return kv_cache, manager, max_model_len

    def _expert_reports(self, model: Decoder) -> ExpertReports:
        """What the warm-up has counted is left out."""
        assert self._backend is not None
        groups, traffic = self._groups, self._backend.traffic
        return ExpertReports(groups.rank, model, traffic, groups.local_ranks, self._channel.send)

    def _scheduler(self, blocks: BlockManager, max_model_len: int) -> Scheduler:
        return Scheduler(
            self._config.scheduler, blocks, max_model_len, self._config.model.vocab_size
        )

    def _warm_up(
        self, runner: ModelRunner, agreement: Agreement, blocks: BlockManager, max_model_len: int
    ) -> None:
        """One real step with the other ranks, on a made-up prompt whose results are dropped."""
        scheduler = self._scheduler(blocks, max_model_len)
        num_tokens = min(
            MAX_WARM_UP_TOKENS,
            max_model_len - 1,
            self._config.scheduler.max_num_batched_tokens,
        )
        prompt = [token % self._config.model.vocab_size for token in range(num_tokens)]
        params = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        refused = scheduler.add(
            AddRequest(request_id="warm-up", epoch=0, prompt_token_ids=prompt, params=params)
        )
        assert refused is None, refused
        schedule = scheduler.schedule()
        batch = runner.batch(schedule)
        self._faults.on_step(WARM_UP_STEP_ID)
        self._plans.send(StepPlan(WARM_UP_STEP_ID, RankState.WORKING, batch))
        agreed = agreement.agree(WARM_UP_STEP_ID, schedule.num_tokens, RankState.WORKING, 0)
        logits = runner.run(batch, agreed.dp_metadata, agreed.decision.graph)
        results = sample(schedule, logits, NO_MASKS)
        scheduler.advance(schedule)
        (output,) = scheduler.update(schedule, results)
        if output.error is not None:
            raise ModelError(f"the warm-up step failed: {output.error}")

    def _with_graphs(
        self, eager: ModelRunner, model: Decoder, blocks: BlockManager, max_model_len: int
    ) -> Runner:
        """The runner of all steps; records the graphs, if there are to be any. Collective."""
        config = self._config
        buckets = config.runner.graph_buckets
        if not buckets:
            return eager
        # On a CPU the calls stand for graphs, which hold anything.
        reads_on_host = self._device.type == "cuda" and model.reads_on_host
        if max(gather_ints(self._groups, int(reads_on_host))):
            logger.warning("decode steps run without graphs: experts wait for counts on a GPU")
            return eager
        self._progress("recording graphs")
        block_size = config.cache.block_size
        copies = model.copies_context
        shapes = graph_shapes(buckets, max_model_len, block_size, copies_context=copies)
        # The blocks beyond those that requests may hold.
        window = blocks.window_blocks
        scrap_blocks = (blocks.num_blocks, None if window is None else window.num_blocks)
        inputs = GraphInputs(shapes, block_size, scrap_blocks, self._device)
        recorder, rank = recorder_for(self._device), self._groups.data_parallel_rank
        return GraphRunner(eager, shapes, inputs, recorder, config.parallel, rank)

    def _progress(self, phase: str) -> None:
        logger.debug("%s", phase)
        self._channel.send(RankProgress(self._groups.rank, phase))
