"""What ``check`` expects of a step of nothing but placeholders, in engines that skip its consumer layers or do not."""

from __future__ import annotations

import numpy as np
import pytest

from vllm_yoco.models.checkpoint import read_model_config
from vllm_yoco.presets import model_presets
from vllm_yoco.tools.check_rows import ROWS, RequestTrace, Tally, against_plan

LENGTH, KEEP, CHUNK = 300, 25, 77


@pytest.mark.parametrize("ran", [True, False])
@pytest.mark.parametrize("may_idle", [True, False])
def test_placeholders_run_unless_the_engine_may_skip_them(may_idle, ran):
    topology = read_model_config(model_presets()["ced-tiny"]).topology()
    trace = RequestTrace.empty(LENGTH, topology.num_consumers, may_idle=may_idle)
    for step, start in enumerate(range(0, LENGTH, CHUNK)):
        trace.add_chunk(start, min(CHUNK, LENGTH - start), step)
    ran_on = list(range(LENGTH - KEEP, LENGTH))
    if ran:
        ran_on += [76, 153, 230]  # the last rows of the chunks below s_keep = 275
    trace.add("layers", np.array(ran_on), np.full(len(ran_on), topology.num_consumers))
    tallies: dict[str, Tally] = {}
    sizes = {"keep_tokens": KEEP, "topology": topology, "block_size": 32}
    against_plan("compact", [trace], tallies, mode="compact", **sizes)
    assert tallies[ROWS].mismatches == (3 if ran == may_idle else 0)
