"""DeepSeek-V4.1: the flags govern vLLM's own model class.

vLLM trims this model's decoder by itself: every chunk of a prompt runs the layers past the last KV source on its last W
rows. What is kept therefore depends on how the prompt was cut. This package replaces that rule by the plugin's, which
depends on the prompt alone, and leaves everything else to vLLM:

    rows.py        integers: lower bound, kept rows, gather lengths (no vLLM)
    swa.py         builder of the consumer layers' SWA metadata that raises the lower bound of what a row sees
    state.py       model state that knows each prompt's length, sets the bound, and picks the kept rows
    model.py       model classes that install both; inert unless a mode is given
    validation.py  what an engine may not be started with
    symbols.py     private vLLM symbols that this package leans on

*Visibility lives in the metadata; dropping rows is an optimisation.* The bound holds for every row in every step,
eager or in a CUDA graph. A step that drops rows gives the kept ones what a step that drops none gives them, so any
step may skip it.

Terms: the *boundary* P is the first layer with compression ratio 1 (layer 20 of V4.1-Flash), which vLLM calls the
cut: its compressed KV and its index keys are written for every row, and the layers above it read them.
``replay_start`` is vLLM's: after a prefix hit it recomputes the hit's last W rows to rebuild the window KV of all
layers, and none exists below that position.
"""
