"""DeepSeek-V4.1 with vLLM's real configuration classes: what is in force, what is refused, what stays vLLM's.

No model is built; the layers that the model's hooks look at are vLLM's own where they hold more than numbers.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.plugins import load_general_plugins

from vllm_yoco import compat, plugin, startup
from vllm_yoco.engine_config import truncation_of

REFERENCE = Path(__file__).parents[1] / "data" / "reference"
FLASH: dict[str, Any] = json.loads((REFERENCE / "cache_partition.json").read_text())["models"]["v41_flash"]
"""The layers of V4.1-Flash; sizes that the checks do not read are small."""
SIZES = {
    "vocab_size": 1024, "hidden_size": 512, "num_attention_heads": 64, "num_key_value_heads": 1, "q_lora_rank": 128,
    "o_lora_rank": 128, "o_groups": 8, "rms_norm_eps": 1e-6, "index_topk": 512, "index_n_heads": 32,
    "candidate_topk_blocks": 2048, "candidate_block_size": 8, "hc_mult": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "moe_intermediate_size": 128, "n_shared_experts": 1, "max_position_embeddings": 65536,
    "engram_layer_ids": [1, 14], "dspark_target_layer_ids": [37, 38, 39], "dspark_block_size": 5,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def plugins() -> None:
    load_general_plugins()


@pytest.fixture(autouse=True)
def runner_v2(stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The runner is asked for when it is needed; a configuration that names V2 cannot be made without Triton."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("v41")
    config = {
        "model_type": "deepseek_v41",
        "architectures": ["DeepseekV41ForCausalLM"],
        "torch_dtype": "bfloat16",
        "text_config": {**FLASH, **SIZES},
        "vision_config": {},
    }
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def engine_args(model: str, **kwargs: Any) -> EngineArgs:
    options: dict[str, Any] = {"skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 8192}
    return EngineArgs(model=model, limit_mm_per_prompt={"image": 0}, **(options | kwargs))


@pytest.fixture(scope="module")
def stock(model: str) -> VllmConfig:
    """The engine's configuration without any setting of ours."""
    return engine_args(model).create_engine_config()


def with_settings(config: VllmConfig, changes: dict[str, Any] | None = None, **settings: Any) -> VllmConfig:
    """A copy with settings of ours and changes at dotted names, in copies of the sections that hold them."""
    config = copy.copy(config)
    config.additional_config = {"yoco": settings} if settings else {}
    for name, value in (changes or {}).items():
        section, _, field = name.rpartition(".")
        owner = config
        for part in section.split(".") if section else ():
            part_copy = copy.copy(getattr(owner, part))
            setattr(owner, part, part_copy)
            owner = part_copy
        setattr(owner, field, value)
    return config


def draft(method: str = "dspark", tokens: int = 5, **hf: Any) -> Any:
    """A speculative configuration as far as vLLM's helper and ours read it."""
    fields = {"model_type": "deepseek_v41", "sliding_window": 128, "dspark_target_layer_ids": [37, 38, 39]} | hf
    return SimpleNamespace(
        method=method,
        num_speculative_tokens=tokens,
        draft_model_config=SimpleNamespace(hf_config=SimpleNamespace(**fields)),
    )


# --- In force -----------------------------------------------------------------------------------------------------


def test_v41_flash_in_numbers(stock: VllmConfig) -> None:
    truncation = truncation_of(with_settings(stock, truncation="compact"))
    assert truncation is not None
    assert (truncation.topology.boundary, truncation.topology.num_consumers) == (20, 20)
    assert (truncation.keep_tokens, truncation.exact_keep_tokens) == (129, 128 + 19 * 127)
    opened = truncation_of(with_settings(stock, truncation="compact", keep_tokens="exact", boundary_swa="open"))
    assert opened is not None and opened.keep_tokens == 128 + 18 * 127
    speculating = with_settings(stock, {"speculative_config": draft()}, truncation="compact")
    assert truncation_of(speculating).keep_tokens == 134


@pytest.mark.parametrize("settings", [{}, {"keep_tokens": 200}, {"prompt_logprobs": "full"}])
def test_without_a_mode_nothing_is_in_force(stock: VllmConfig, settings: dict[str, Any]) -> None:
    config = with_settings(stock, **settings)
    assert truncation_of(config) is None
    startup.validate(config)


def test_off_is_in_force_where_it_is_asked_for(stock: VllmConfig) -> None:
    config = with_settings(stock, truncation="off")
    startup.validate(config)
    truncation = truncation_of(config)
    assert truncation is not None and not truncation.active
    line = startup.describe(truncation, config)
    assert line.startswith("YOCO truncation off: 20 producer + 20 consumer layers") and "vLLM's trimming" in line


def test_start_up_line(stock: VllmConfig) -> None:
    config = with_settings(stock, truncation="compact", keep_tokens=140)
    startup.validate(config)
    line = startup.describe(truncation_of(config), config)  # type: ignore[arg-type]
    for part in (
        "YOCO truncation compact: K=140 (given), W=128, B=1, approximate (lossless from K=2541)",
        "20 producer + 20 consumer layers (boundary 20, 20 consumers with SWA)",
        "prefill layer rows removed: 48% at L=4096, 49% at L=8192",
        "compressed KV and index keys of layers 2, 8, 14, 20",
        "window KV (20 producers, 20 consumers)",
        "boundary SWA clipped",
    ):
        assert part in line


def test_flags_reach_the_configuration(model: str, stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    flags = {"yoco_truncation": "off", "yoco_boundary_swa": "open", "yoco_keep_tokens": 300}
    truncation = truncation_of(engine_args(model, **flags).create_engine_config())
    assert truncation is not None
    assert (truncation.mode, truncation.keep_tokens, truncation.boundary_swa) == ("off", 300, "open")
    if not stock.use_v2_model_runner:  # no Triton here: vLLM takes runner V1, and no engine is started with a mode
        with pytest.raises(ValueError, match="Model Runner V1"):
            engine_args(model, **(flags | {"yoco_truncation": "compact"})).create_engine_config()


# --- Refused ------------------------------------------------------------------------------------------------------

HF = "model_config.hf_config."
REFUSED: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("K", {}, {"keep_tokens": 128}, r"--yoco-keep-tokens .*=128: must be at least W \+ B = 128 \+ 1 = 129"),
    ("engram", {HF + "engram_layer_ids": [1, 20]}, {}, r"Engram layers \[20\] lie at or above the boundary 20"),
    ("no ratio 1", {HF + "compress_ratios": [0, 0] + [2] * 38 + [0] * 3}, {}, "no consumer boundary"),
    ("boundary shares KV", {HF + "kv_source_layer_ids": [2, 8, 14]}, {}, "may not cross the boundary"),
    (
        "boundary shares its index",
        {HF + "index_source_layer_ids": [2, 8, 14, 24], HF + "index_k_source_layer_ids": [2, 8, 14, 24]},
        {},
        "layer 20 .* cannot share",
    ),
    (
        "KV source above the boundary",
        {HF + "kv_source_layer_ids": [2, 8, 14, 20, 24]},
        {},
        r"kv_source_layer_ids has \[20, 24\].*vLLM splits the model at its last",
    ),
    ("prefix caching of windows", {"cache_config.swa_bounded_replay": False}, {}, "--swa-bounded-replay=False"),
    ("PCP", {"parallel_config.prefill_context_parallel_size": 2}, {}, "--prefill-context-parallel-size=2"),
    ("DCP", {"parallel_config.decode_context_parallel_size": 2}, {}, "--decode-context-parallel-size=2"),
    ("PP after the cut", {"parallel_config.pipeline_parallel_size": 4}, {}, r"--pipeline-parallel-size=4.*boundary 20"),
    ("microbatching", {"parallel_config.enable_dbo": True}, {}, "--enable-dbo=True"),
    (
        "sequence parallel",
        {
            "parallel_config.enable_expert_parallel": True,
            "parallel_config.tensor_parallel_size": 4,
            "parallel_config.data_parallel_size": 2,
        },
        {},
        "--enable-expert-parallel=True with --tensor-parallel-size=4.*sequence parallelism",
    ),
    (
        "draft targets on both sides",
        {"speculative_config": draft(dspark_target_layer_ids=[19, 37])},
        {"keep_tokens": 140},
        r"draft target layers \[19, 37\].*on one side",
    ),
    (
        "drafter without a window",
        {"speculative_config": draft(layer_types=["sliding_attention", "full_attention"])},
        {},
        "layers without a sliding window",
    ),
    (
        "drafter window beyond the kept rows",
        {"speculative_config": draft(sliding_window=256)},
        {"keep_tokens": 140},
        r"window of 256 plus B = 6 reaches below.*K = 140.*--yoco-keep-tokens 262",
    ),
    ("another drafter", {"speculative_config": draft("eagle3", dspark_target_layer_ids=[])}, {}, "method=eagle3"),
    (
        "routed experts",
        {"aux_output_config.enable_return_routed_experts": True},
        {},
        "--enable-return-routed-experts=True",
    ),
    ("LoRA", {"lora_config": object()}, {}, "--enable-lora=True"),
]
ONLY_COMPACT = {
    "engram", "sequence parallel", "draft targets on both sides", "drafter without a window",
    "drafter window beyond the kept rows", "another drafter", "LoRA",
}  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "settings", "message"), REFUSED, ids=[case[0] for case in REFUSED])
def test_refused(
    stock: VllmConfig, name: str, changes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        startup.validate(with_settings(stock, changes, truncation="compact", **settings))
    assert "\n" not in str(caught.value)
    masked = with_settings(stock, changes, truncation="mask", **settings)
    if name in ONLY_COMPACT:
        startup.validate(masked)
    else:
        with pytest.raises(ValueError, match=message):
            startup.validate(masked)
    # Neither off nor the absence of a mode minds what only truncation cannot have.
    if "compress_ratios" not in str(changes) and "source" not in str(changes):
        startup.validate(with_settings(stock, changes, truncation="off"))
    startup.validate(with_settings(stock, changes))


def test_runner_v1_is_refused(stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    for mode in ("mask", "compact"):
        with pytest.raises(ValueError, match=r"VLLM_USE_V2_MODEL_RUNNER.*Model Runner V1"):
            startup.validate(with_settings(stock, truncation=mode))


def test_rocm_is_refused(stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    for mode in ("off", "mask", "compact"):
        with pytest.raises(ValueError, match="ROCm"):
            startup.validate(with_settings(stock, truncation=mode))
    startup.validate(with_settings(stock))


def test_pipeline_split_at_the_boundary_is_allowed(stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_settings(stock, {"parallel_config.pipeline_parallel_size": 2}, truncation="compact")
    startup.validate(config)
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "22,18")
    with pytest.raises(ValueError, match=r"splits the layers into \[\(0, 22\), \(22, 40\)\]"):
        startup.validate(config)


def test_allowed_drafters(stock: VllmConfig) -> None:
    for speculative in (draft(), draft(dspark_target_layer_ids=[3, 20 - 1]), draft("ngram")):
        startup.validate(with_settings(stock, {"speculative_config": speculative}, truncation="compact"))


def test_boundary_swa_is_for_this_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.test_flags import engine_config, save

    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    with pytest.raises(ValueError, match=r"--yoco-boundary-swa .*=open: is for DeepSeek-V4\.1"):
        engine_config(save(tmp_path), additional_config={"yoco": {"truncation": "mask", "boundary_swa": "open"}})


def test_a_worker_without_the_plugin_is_noticed_in_off_too(
    stock: VllmConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compat, "_active", False)
    for mode in ("off", "mask", "compact"):
        with pytest.raises(RuntimeError, match="not loaded in the worker"):
            startup.validate(with_settings(stock, truncation=mode), process="worker")
    startup.validate(with_settings(stock), process="worker")


# --- vLLM's own conditions ----------------------------------------------------------------------------------------


def test_sequence_parallel_is_recognised_as_vllm_does(stock: VllmConfig) -> None:
    from vllm.models.deepseek_v41.nvidia.model import _use_sequence_parallel

    from vllm_yoco.deepseek_v41.validation import uses_sequence_parallel

    seen = set()
    for pp in (1, 2):
        for ep in (False, True):
            for tp in (1, 4):
                for dp in (1, 2):
                    for backend in ("auto", "deep_gemm_mega_moe"):
                        config = with_settings(
                            stock,
                            {
                                "parallel_config.pipeline_parallel_size": pp,
                                "parallel_config.enable_expert_parallel": ep,
                                "parallel_config.tensor_parallel_size": tp,
                                "parallel_config.data_parallel_size": dp,
                                "kernel_config.moe_backend": backend,
                            },
                        )
                        seen.add(_use_sequence_parallel(config))
                        assert uses_sequence_parallel(config) == _use_sequence_parallel(config)
    assert seen == {True, False}


def test_symbols() -> None:
    from vllm_yoco.deepseek_v41.symbols import SYMBOLS

    assert compat.broken_symbols(SYMBOLS, load=True) == []
    names = [(symbol.module, symbol.name) for symbol in SYMBOLS]
    assert len(names) == len(set(names))


# --- Model classes ------------------------------------------------------------------------------------------------


def test_registered_under_vllms_name() -> None:
    from vllm import ModelRegistry
    from vllm.models.deepseek_v41 import DeepseekV41ForCausalLM

    ours = ModelRegistry.models[plugin.DEEPSEEK_V41_ARCHITECTURE].load_model_cls()
    assert issubclass(ours, DeepseekV41ForCausalLM) and ours is not DeepseekV41ForCausalLM
    assert ours.__name__ == "DeepseekV41ForCausalLM"


def build(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our wrapper over vLLM's, whose constructor is cut down to the choice of the language model's class."""
    from vllm.models.deepseek_v41.nvidia import vl_model

    from vllm_yoco.deepseek_v41.model import DeepseekV41ForCausalLM

    def __init__(self: Any, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        torch.nn.Module.__init__(self)
        cls = vl_model.DeepseekV41LLMForCausalLM
        self.language_model = cls.__new__(cls)
        torch.nn.Module.__init__(self.language_model)
        self.language_model.model = SimpleNamespace(yoco=None)
        # vLLM 0.33's get_model_state_cls reads it.
        self.language_model.specialized_decode_config = None

    monkeypatch.setattr(vl_model.DeepseekV41ForCausalLM, "__init__", __init__)
    return DeepseekV41ForCausalLM(vllm_config=config)


def test_without_a_mode_everything_is_vllms(stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.models.deepseek_v41.nvidia.model import DeepseekV41LLMForCausalLM
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    model = build(with_settings(stock, keep_tokens=200), monkeypatch)
    assert type(model.language_model) is DeepseekV41LLMForCausalLM
    assert model.get_model_state_cls() is DeepseekV41ModelState
    assert model.yoco is None


@pytest.mark.parametrize("mode", ["off", "mask", "compact"])
def test_with_a_mode_the_language_model_is_ours(
    stock: VllmConfig, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.models.deepseek_v41.nvidia import vl_model
    from vllm.models.deepseek_v41.nvidia.model_state import DeepseekV41ModelState

    from vllm_yoco.deepseek_v41.language_model import TruncatedLanguageModel, TruncatedModel
    from vllm_yoco.deepseek_v41.state import TruncatingStateMixin

    before = vl_model.DeepseekV41LLMForCausalLM
    model = build(with_settings(stock, truncation=mode), monkeypatch)
    assert vl_model.DeepseekV41LLMForCausalLM is before
    assert type(model.language_model) is TruncatedLanguageModel and TruncatedLanguageModel.model_cls is TruncatedModel
    assert model.get_model_state_cls() is DeepseekV41ModelState  # nothing to truncate on this stage, or off
    model.language_model.model.yoco = object()
    state = model.get_model_state_cls()
    assert issubclass(state, TruncatingStateMixin) and issubclass(state, DeepseekV41ModelState)


def test_wrong_settings_fail_before_the_model_is_built(stock: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    config = with_settings(stock, {"parallel_config.prefill_context_parallel_size": 2}, truncation="compact")
    with pytest.raises(ValueError, match="--prefill-context-parallel-size=2"):
        build(config, monkeypatch)


@pytest.mark.parametrize(
    ("changes", "cut", "message"),
    [
        ({}, 24, "vLLM cuts the model at layer 24"),
        ({"end_layer": 30}, 20, r"holds layers 0\.\.29"),
        ({"start_layer": 21}, 20, r"holds layers 21\.\.39"),
        ({"use_sequence_parallel": True}, 20, "sequence parallelism"),
    ],
)
def test_decoder_replay_is_ours_or_an_error(
    stock: VllmConfig, changes: dict[str, Any], cut: int, message: str
) -> None:
    from vllm_yoco.deepseek_v41.language_model import TruncatedModel

    def supported(mode: str, **attributes: Any) -> bool:
        built = {"start_layer": 0, "end_layer": 40, "use_sequence_parallel": False} | attributes
        return TruncatedModel._decoder_replay_supported(
            SimpleNamespace(**built),  # type: ignore[arg-type]
            with_settings(stock, truncation=mode),
            cut,
        )

    assert supported("off", **changes) is False and supported("mask", **changes) is False
    with pytest.raises(ValueError, match=message):
        supported("compact", **changes)


def test_decoder_replay_with_our_rows(stock: VllmConfig) -> None:
    from vllm_yoco.deepseek_v41.language_model import TruncatedModel

    built = SimpleNamespace(start_layer=0, end_layer=40, use_sequence_parallel=False)
    assert TruncatedModel._decoder_replay_supported(built, with_settings(stock, truncation="compact"), 20)  # type: ignore


def test_draft_targets_of_the_built_model(stock: VllmConfig) -> None:
    from vllm_yoco.deepseek_v41.language_model import TruncatedModel

    truncation = truncation_of(with_settings(stock, truncation="compact"))
    built = TruncatedModel.__new__(TruncatedModel)
    torch.nn.Module.__init__(built)
    built.yoco = SimpleNamespace(truncation=truncation)  # type: ignore[assignment]
    built._set_aux_hidden_state_layers((20, 39))
    assert built.aux_hidden_state_layers == (20, 39)
    with pytest.raises(ValueError, match=r"draft target layers \[19, 20\]"):
        built._set_aux_hidden_state_layers((19, 20))


def test_window_kv_in_prefix_caching_is_an_error(stock: VllmConfig) -> None:
    from vllm_yoco.deepseek_v41.model_hooks import install_bound

    truncation = truncation_of(with_settings(stock, truncation="mask"))
    cache = SimpleNamespace(bounded_replay=False)
    layers = [SimpleNamespace(attn=SimpleNamespace(swa_cache_layer=cache))] * 40
    with pytest.raises(ValueError, match="layer 20 takes part in prefix caching"):
        install_bound(truncation, layers, range(40), 4, torch.device("cpu"))  # type: ignore[arg-type]


@pytest.mark.parametrize(("boundary_swa", "first"), [("clipped", 20), ("open", 21)])
def test_which_layers_are_bounded(stock: VllmConfig, boundary_swa: str, first: int) -> None:
    from vllm.models.deepseek_v41.nvidia.flashmla import DeepseekSparseSWAFlashMLABackend

    from vllm_yoco.deepseek_v41.model_hooks import install_bound

    truncation = truncation_of(with_settings(stock, truncation="compact", boundary_swa=boundary_swa))
    caches = [
        SimpleNamespace(prefix=f"layer {n}", bounded_replay=True, backend_cls=DeepseekSparseSWAFlashMLABackend)
        for n in range(40)
    ]
    layers = [SimpleNamespace(attn=SimpleNamespace(swa_cache_layer=cache)) for cache in caches]
    parts = install_bound(truncation, layers, range(40), 4, torch.device("cpu"))  # type: ignore[arg-type]
    bounded = [n for n, cache in enumerate(caches) if cache.backend_cls is not DeepseekSparseSWAFlashMLABackend]
    assert bounded == list(range(first, 40)) and parts.clipped_prefixes == {f"layer {n}" for n in bounded}
    assert len({cache.backend_cls.full_cls_name() for cache in caches}) == 2
    assert caches[39].backend_cls.get_name() == DeepseekSparseSWAFlashMLABackend.get_name()


# --- Prefix hits --------------------------------------------------------------------------------------------------


BLOCK = 128
"""Tokens; the default of 0.32, and not that of 0.33."""


def prefix_hit(config: VllmConfig, num_prompt_tokens: int, num_shared: int) -> tuple[int, int]:
    """vLLM's scheduler on a prompt that shares its beginning with an earlier one.

    Returns:
        the first row that is computed, and ``replay_start``: below it no layer has window KV.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowMLASpec
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.block_size = block = BLOCK
    latents = {"num_kv_heads": 1, "head_size": 512, "dtype": torch.uint8}
    groups = [
        KVCacheGroupSpec(["compressed"], MLAAttentionSpec(block_size=block, **latents)),
        KVCacheGroupSpec(
            ["window"],
            SlidingWindowMLASpec(
                block_size=32, sliding_window=128, bounded_replay=True, model_version="deepseek_v4", **latents
            ),
        ),
    ]
    cache = KVCacheConfig(num_blocks=2000, kv_cache_tensors=[], kv_cache_groups=groups)
    config.cache_config.num_gpu_blocks = 2000
    scheduler = Scheduler(config, cache, StructuredOutputManager(config), block, log_stats=False)
    init_none_hash(sha256)
    tokens = list(range(8000))

    def request(name: str, prompt: list[int]) -> Request:
        hasher = get_request_block_hasher(32, sha256)
        return Request(name, prompt, SamplingParams(max_tokens=4), None, block_hasher=hasher)

    scheduler.add_request(request("first", tokens[:num_shared]))
    scheduler.schedule()
    scheduler.finish_requests("first", RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(request("second", tokens[:num_shared] + tokens[-(num_prompt_tokens - num_shared) :]))
    (new,) = scheduler.schedule().scheduled_new_reqs
    assert new.prompt_len == num_prompt_tokens
    return new.num_computed_tokens, new.replay_start


@pytest.mark.parametrize("keep", [129, 140, 600])
def test_the_last_k_rows_are_computed_after_a_prefix_hit(stock: VllmConfig, keep: int) -> None:
    """A hit that would leave less is shortened by whole blocks: rows [L - K, L) are computed, all with window KV."""
    length, block = 2100, BLOCK
    start, replay_start = prefix_hit(with_settings(stock, truncation="compact", keep_tokens=keep), length, 2080)
    assert start == replay_start <= length - keep
    assert length - keep - start < block  # and no more than that is given up
    # vLLM's own rule, and off, replay the last window of the longest hit, wherever the prompt ends.
    for settings in ({}, {"truncation": "off"}):
        assert prefix_hit(with_settings(stock, **settings), length, 2080) == (2048 - 128, 2048 - 128)
    if keep > 140:
        assert length - keep < 2048 - 128
    # A hit that ends early enough is taken whole.
    assert prefix_hit(with_settings(stock, truncation="compact", keep_tokens=keep), length, 1024) == (896, 896)
