"""Serving step by step: arrivals and aborts at chosen steps, and a record of what each step scheduled."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.engine.harness import EngineConfig, Engines, Request, Result, sampling_params, scheduler_of, to_result


@dataclass(frozen=True)
class Arrival:
    """A request that arrives before engine step ``at`` and, perhaps, is aborted before step ``abort_at``."""

    request: Request
    at: int = 0
    abort_at: int | None = None


@dataclass
class Step:
    """One scheduled step. Requests are named by their index among the arrivals.

    Attributes:
        rows: request -> rows of its chunk, drafts included.
        start: request -> position of the chunk's first row.
        drafts: request -> draft tokens among its rows.
        resumed: requests that come back from preemption.
    """

    rows: dict[int, int]
    start: dict[int, int]
    drafts: dict[int, int]
    resumed: set[int]


@dataclass
class Served:
    """``results`` has None for a request that was aborted in time; ``preemptions`` counts per request."""

    results: list[Result | None]
    steps: list[Step] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)


def serve(engines: Engines, config: EngineConfig, arrivals: Sequence[Arrival]) -> Served:
    """Run the arrivals through the engine until it is idle."""
    from vllm.inputs import TokensPrompt
    from vllm.sampling_params import RequestOutputKind

    engine = engines.get(config).llm_engine
    served = Served([None] * len(arrivals), preemptions=[0] * len(arrivals))
    index_of: dict[str, int] = {}
    with _recording(scheduler_of(engines, config), index_of, served):
        step = 0
        while step <= max(arrival.at for arrival in arrivals) or engine.has_unfinished_requests():
            for index, arrival in enumerate(arrivals):
                if arrival.at == step:
                    params = sampling_params(arrival.request)
                    params.output_kind = RequestOutputKind.FINAL_ONLY
                    prompt = TokensPrompt(prompt_token_ids=list(arrival.request.prompt))
                    index_of[engine.add_request(str(index), prompt, params)] = index
            engine.abort_request([str(index) for index, arrival in enumerate(arrivals) if arrival.abort_at == step])
            for output in engine.step():
                if output.finished and output.outputs[0].finish_reason != "abort":
                    served.results[int(output.request_id)] = to_result(output)
            step += 1
    return served


@contextmanager
def _recording(scheduler: Any, index_of: dict[str, int], served: Served) -> Iterator[None]:
    schedule, preempt = scheduler.schedule, scheduler._preempt_request

    def recorded_schedule(*args: Any, **kwargs: Any) -> Any:
        output = schedule(*args, **kwargs)
        cached = output.scheduled_cached_reqs
        start = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        start |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        drafts = {name: len(tokens) for name, tokens in output.scheduled_spec_decode_tokens.items()}
        resumed = {index_of[name] for name in start if scheduler.requests[name].num_preemptions > seen.get(name, 0)}
        seen.update({name: scheduler.requests[name].num_preemptions for name in start})
        if start:
            tables = (output.num_scheduled_tokens, start, drafts)
            served.steps.append(Step(*({index_of[name]: n for name, n in table.items()} for table in tables), resumed))
        return output

    def recorded_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        served.preemptions[index_of[request.request_id]] += 1
        return preempt(request, *args, **kwargs)

    seen: dict[str, int] = {}
    scheduler.schedule, scheduler._preempt_request = recorded_schedule, recorded_preempt
    try:
        yield
    finally:
        scheduler.schedule, scheduler._preempt_request = schedule, preempt
