"""Private vLLM symbols of the DeepSeek-V4.1 adapter. Checked only where such a model is served with a mode."""

from __future__ import annotations

from vllm_yoco.compat import Symbol

_STATE = "vllm.models.deepseek_v41.nvidia.model_state"
_MODEL = "vllm.models.deepseek_v41.nvidia.model"
_SWA = "vllm.v1.attention.backends.mla.sparse_swa"
_LAYERS = "vllm.models.deepseek_v41.decoder_replay_layers"

SYMBOLS: tuple[Symbol, ...] = (
    # model.py, language_model.py
    Symbol("vllm.models.deepseek_v41", "DeepseekV41ForCausalLM", "build the model"),
    Symbol("vllm.models.deepseek_v41.nvidia.vl_model", "DeepseekV41LLMForCausalLM", "build our language model"),
    Symbol(_MODEL, "DeepseekV41LLMForCausalLM.model_cls", "build our decoder layers"),
    Symbol(_MODEL, "DeepseekV41LLMForCausalLM.get_model_state_cls", "derive the model state"),
    Symbol(
        _MODEL, "DeepseekV4Model._decoder_replay_supported", "decide whether rows drop", ("vllm_config", "cut")
    ),
    Symbol(_MODEL, "DeepseekV4Model._run_replay_layers", "run the consumer layers on the kept rows"),
    Symbol(_MODEL, "DeepseekV4Model._set_aux_hidden_state_layers", "check draft targets", ("layers",)),
    # swa.py
    Symbol(
        _SWA,
        "DeepseekSparseSWAMetadataBuilder.build",
        "raise the lower bound",
        ("common_prefix_len", "common_attn_metadata", "fast_build", "replay_start"),
    ),
    Symbol(_SWA, "DeepseekSparseSWAMetadata.replay_start", "raise the lower bound"),
    Symbol(_SWA, "DeepseekSparseSWAMetadata.prefill_gather_lens", "start the gathered range at the bound"),
    Symbol(_SWA, "DeepseekSparseSWAMetadata.prefill_swa_lens", "empty the rows below the bound"),
    Symbol(_SWA, "DeepseekSparseSWAMetadata.decode_swa_lens", "empty the rows below the bound"),
    Symbol(_SWA, "DeepseekV4SWACache.get_attn_backend", "give consumer SWA an attention group"),
    Symbol("vllm.v1.attention.backends.utils", "subclass_attention_backend", "give consumer SWA a builder"),
    # state.py
    Symbol(_STATE, "DeepseekV41ModelState.add_request", "learn prompt lengths", ("req_index", "new_req_data")),
    Symbol(_STATE, "DeepseekV41ModelState.prepare_attn", "set the bound", ("input_batch", "cudagraph_mode")),
    Symbol(
        _STATE,
        "DeepseekV41ModelState._prepare_replay_batch",
        "choose the kept rows",
        (
            "input_batch",
            "cudagraph_mode",
            "block_tables",
            "slot_mappings",
            "attn_groups",
            "kv_cache_config",
            "replay_start",
            "capture_desc",
        ),
    ),
    Symbol(
        _STATE,
        "DeepseekV41ModelState._kept_input_batch",
        "gather the kept rows",
        ("input_batch", "slot_mappings", "replay_start", "kept_lens", "num_padded"),
    ),
    Symbol(
        _STATE, "DeepseekV41ModelState._copy_attn_groups", "build the sub-batch", ("attn_groups", "prefixes")
    ),
    Symbol(
        _STATE, "DeepseekV41ModelState._agree_across_dp", "agree across ranks", ("needs_replay_batch", "num_tokens")
    ),
    Symbol(_STATE, "ReplayAttnMetadata", "hand replay starts to the builders", ("replay_start",)),
    Symbol(_LAYERS, "ReplayBatch", "set the sub-batch", ("rows", "forward_context", "run_graph")),
    Symbol(_LAYERS, "DecoderReplayLayers.graph_uses_replay_batch", "follow the graphs", ("num_tokens",)),
    Symbol("vllm.models.deepseek_v41.nvidia.ops.mhc", "MHC_OVERLAP_MAX_TOKENS", "leave tiny batches whole"),
    Symbol("vllm.v1.core.sched.output", "NewRequestData.prompt_len", "learn prompt lengths"),
)
"""As ``compat.SYMBOLS``."""
