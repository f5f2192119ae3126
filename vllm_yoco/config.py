"""The plugin's settings, and how K follows from them and the model. No vLLM import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from vllm_yoco.plan import exact_keep_tokens, minimum_keep_tokens
from vllm_yoco.topology import LayerTopology

Mode = Literal["off", "mask", "compact"]
PromptLogprobsPolicy = Literal["drop", "reject", "full"]
KeepTokens = int | Literal["min", "exact"]
BoundarySwa = Literal["clipped", "open"]

CONFIG_KEY = "yoco"
"""Key of the plugin's settings in vLLM's ``additional_config``."""

MAX_KEEP_TOKENS = 2**31 - 1
"""Token counts are int32 on the device and int64 on the host; a larger K would overflow at the first request."""


def flag_of(field: str) -> str:
    return "--plugin" if field == "plugins" else f"--yoco-{field.replace('_', '-')}"


def flag_name(field: str) -> str:
    """Both spellings of a setting: ``--yoco-keep-tokens (additional_config["yoco"]["keep_tokens"])``."""
    return f'{flag_of(field)} (additional_config["{CONFIG_KEY}"]["{field}"])'


class YocoConfig(BaseModel):
    """Settings of prefill truncation as the user gave them.

    Attributes:
        truncation: ``off`` changes nothing; ``mask`` narrows consumer SWA visibility but computes every row;
            ``compact`` has the same visibility and does not compute the dropped rows.
        keep_tokens: K, the last prompt rows that consumers run on: a number, ``min`` (W + B) or ``exact``
            (the smallest lossless K).
        prompt_logprobs: what happens to a request that asks for prompt log-probabilities.
        boundary_swa: the boundary layer's own SWA on DeepSeek-V4.1, whose window KV exists for every row:
            ``clipped`` at s_keep like that of the other consumers, or ``open``.
        plugins: names given with ``--plugin``; each must be loaded in every process.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    truncation: Mode = "off"
    keep_tokens: KeepTokens = "min"
    prompt_logprobs: PromptLogprobsPolicy = "drop"
    boundary_swa: BoundarySwa = "clipped"
    plugins: tuple[str, ...] = ()

    @property
    def is_given(self) -> bool:
        """Whether a mode was named at all: on DeepSeek-V4.1 ``off`` is not what vLLM does by itself."""
        return "truncation" in self.model_fields_set

    @field_validator("keep_tokens", mode="before")
    @classmethod
    def _parse_keep_tokens(cls, value: object) -> object:
        if isinstance(value, str) and value.strip().isdecimal():
            value = int(value.strip())
        if isinstance(value, bool) or not (isinstance(value, int) or value in ("min", "exact")):
            raise ValueError("not a number of tokens")
        if isinstance(value, int) and not 1 <= value <= MAX_KEEP_TOKENS:
            raise ValueError("not a possible number of rows")
        return value

    @classmethod
    def from_additional_config(cls, additional_config: object) -> YocoConfig:
        """Read ``additional_config["yoco"]``; absent means the defaults (mode ``off``).

        Raises:
            ValueError: one line per wrong setting, with the flag, the value, the rule and the fix.
        """
        section = additional_config.get(CONFIG_KEY, {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(section, Mapping):
            raise ValueError(
                f'additional_config["{CONFIG_KEY}"]={section!r}: must be a mapping such as'
                ' {"truncation": "compact", "keep_tokens": "min"}.'
            )
        try:
            return cls(**section)
        except ValidationError as error:
            wrong: dict[str, Any] = {str(item["loc"][0]): item["input"] for item in error.errors()}
            raise ValueError("; ".join(_explain(field, value) for field, value in wrong.items())) from None


def _explain(field: str, value: object) -> str:
    if field not in YocoConfig.model_fields:
        known = ", ".join(YocoConfig.model_fields)
        return f'additional_config["{CONFIG_KEY}"] has the unknown key {field!r}; known keys are {known}.'
    rules = {
        "truncation": f"must be one of {', '.join(get_args(Mode))}.",
        "keep_tokens": "must be a positive number of tokens, min or exact.",
        "prompt_logprobs": f"must be one of {', '.join(get_args(PromptLogprobsPolicy))}.",
        "boundary_swa": f"must be one of {', '.join(get_args(BoundarySwa))}.",
        "plugins": "must be a list of plugin names.",
    }
    if field == "keep_tokens" and str(value).strip().isdecimal() and int(str(value)) > MAX_KEEP_TOKENS:
        rules[field] = f"must be at most {MAX_KEEP_TOKENS}; exact is the least lossless K."
    return f"{flag_name(field)}={value!r}: {rules[field]}"


@dataclass(frozen=True)
class Truncation:
    """The settings in force for one model: what ``YocoConfig`` means on its topology.

    Attributes:
        mode: ``off``, ``mask`` or ``compact``.
        keep_tokens: K in rows.
        keep_tokens_rule: how K was chosen: ``min``, ``exact`` or ``given``.
        minimum_keep_tokens: the smallest K allowed here, in rows.
        exact_keep_tokens: the smallest lossless K, in rows.
        max_backtracking: B = speculative tokens + 1.
        prompt_logprobs: policy for requests that ask for prompt log-probabilities.
        boundary_swa: whether the boundary layer's own SWA is clipped at s_keep.
    """

    mode: Mode
    keep_tokens: int
    keep_tokens_rule: Literal["min", "exact", "given"]
    minimum_keep_tokens: int
    exact_keep_tokens: int
    max_backtracking: int
    prompt_logprobs: PromptLogprobsPolicy
    topology: LayerTopology
    boundary_swa: BoundarySwa = "clipped"

    @property
    def active(self) -> bool:
        return self.mode != "off"

    @property
    def lossless(self) -> bool:
        return not self.active or self.keep_tokens >= self.exact_keep_tokens

    def removed_share(self, num_prompt_tokens: int) -> float:
        """Share of prefill layer rows that compact does not run, for one prompt in one chunk."""
        dropped = max(0, num_prompt_tokens - self.keep_tokens) if self.mode == "compact" else 0
        return dropped * self.topology.num_consumers / (num_prompt_tokens * self.topology.num_layers)


def resolve_truncation(config: YocoConfig, topology: LayerTopology, *, max_backtracking: int = 1) -> Truncation:
    """Fix K for a model.

    Args:
        max_backtracking: B = number of speculative tokens + 1.

    Raises:
        ValueError: a mode on a model without consumers, or K below its minimum.
    """
    window = topology.consumer_window
    least = minimum_keep_tokens(window, max_backtracking)
    # A boundary layer that sees its whole window adds nothing to the depth of clipped layers.
    num_clipped = sum(
        layer != topology.boundary or config.boundary_swa == "clipped" for layer in topology.swa_layers
    )
    exact = max(least, exact_keep_tokens(window, max_backtracking, num_clipped, topology.swa_share_hidden))
    if config.truncation != "off" and topology.num_consumers == 0:
        raise ValueError(
            f"{flag_name('truncation')}={config.truncation}: the model has no consumer layers"
            f" (n_prefill_layer={topology.boundary} of {topology.num_layers} layers), so there is nothing to truncate."
            " Use --yoco-truncation off."
        )
    rule: Literal["min", "exact", "given"]
    if isinstance(config.keep_tokens, int):
        keep, rule = config.keep_tokens, "given"
    else:
        keep, rule = {"min": least, "exact": exact}[config.keep_tokens], config.keep_tokens
    if config.truncation != "off" and keep < least:
        raise ValueError(
            f"{flag_name('keep_tokens')}={keep}: must be at least W + B = {window} + {max_backtracking} = {least}"
            " (sliding window + speculative tokens + 1), or a decode step would look below the kept rows."
            f" Use {least} or more, min or exact (here {exact})."
        )
    return Truncation(
        mode=config.truncation,
        keep_tokens=keep,
        keep_tokens_rule=rule,
        minimum_keep_tokens=least,
        exact_keep_tokens=exact,
        max_backtracking=max_backtracking,
        prompt_logprobs=config.prompt_logprobs,
        topology=topology,
        boundary_swa=config.boundary_swa,
    )
