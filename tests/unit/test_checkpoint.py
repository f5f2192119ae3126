"""Checkpoints: random weights, the byte tokenizer, files on disk, and the init-model command."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import DecodeStream
from transformers import AutoTokenizer, GenerationConfig

from vllm_yoco import __version__
from vllm_yoco.models.checkpoint import (
    BOS,
    EOS,
    PAD,
    byte_tokenizer,
    load_checkpoint,
    parameter_count,
    parameter_shapes,
    random_state_dict,
    read_model_config,
    save_checkpoint,
)
from vllm_yoco.models.config import YocoModelConfig
from vllm_yoco.presets import find_model_config, model_presets
from vllm_yoco.tools import cli

SMALL: dict[str, Any] = dict(
    vocab_size=262, hidden_size=32, intermediate_size=48, num_hidden_layers=4, n_prefill_layer=2,
    num_attention_heads=4, num_key_value_heads=2, sliding_window=6, max_position_embeddings=512,
    kv_source_layers=[2], consumer_swa_layers=[3],
)  # fmt: skip
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
}


# -- weights ---------------------------------------------------------------------------------------------------


def test_names_and_shapes() -> None:
    shapes = parameter_shapes(YocoModelConfig(**SMALL))
    attention = {
        (int(name.split(".")[2]), name.split(".")[4]): shape for name, shape in shapes.items() if "self_attn" in name
    }
    q, kv = (32, 32), (16, 32)
    assert attention == {
        **{(i, "q_proj"): q for i in range(4)},
        **{(i, name): kv for i in range(3) for name in ("k_proj", "v_proj")},
        **{(i, "o_proj"): (32, 32) for i in range(3)},
        (3, "swa_q_proj"): q,
        (3, "swa_k_proj"): kv,
        (3, "swa_v_proj"): kv,
        (3, "o_proj"): (32, 64),
    }
    assert shapes["model.embed_tokens.weight"] == shapes["lm_head.weight"] == (262, 32)
    assert "lm_head.weight" not in parameter_shapes(YocoModelConfig(**SMALL, tie_word_embeddings=True))
    assert all(name.endswith(".weight") for name in shapes)


def test_random_weights_depend_on_seed_and_config_alone() -> None:
    config = YocoModelConfig(**SMALL)
    a, b, c = (random_state_dict(config, seed) for seed in (7, 7, 8))
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(a["lm_head.weight"], c["lm_head.weight"])
    # A fixed value: a checkpoint made elsewhere or years later is the same one.
    assert a["model.norm.weight"].eq(1).all()
    fixed = [0.021283788606524467, 0.015455116517841816, 0.014799127355217934]
    assert a["lm_head.weight"][0, :3].tolist() == pytest.approx(fixed, abs=1e-7)


def test_a_changed_layer_leaves_the_others() -> None:
    plain = random_state_dict(YocoModelConfig(**SMALL), 0)
    wider = random_state_dict(YocoModelConfig(**SMALL | {"consumer_swa_layers": [2, 3]}), 0)
    same = [name for name in plain if wider[name].shape == plain[name].shape]
    assert len(same) == len(plain) - 1
    assert all(torch.equal(plain[name], wider[name]) for name in same)


def test_scales() -> None:
    config = YocoModelConfig(**SMALL | {"hidden_size": 128, "initializer_range": 0.1})
    weights = random_state_dict(config, 0)
    assert weights["model.layers.3.self_attn.swa_q_proj.weight"].std().item() == pytest.approx(0.1, rel=0.05)
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        scale = weights[f"model.layers.3.{name}.weight"].std().item()
        assert scale == pytest.approx(0.1 * 8**-0.5, rel=0.05)


# -- tokenizer -------------------------------------------------------------------------------------------------

TOKENIZER = byte_tokenizer(262, 512)
SPECIAL = tuple(TOKENIZER.get_added_vocab())
# Hypothesis also tries the literals of this repository, "<eos>" among them.
PLAIN_TEXT = st.text().filter(lambda text: not any(token in text for token in SPECIAL))
TEXTS = ["", "plain", "Grüße, 世界", "emoji 😀👩‍👩‍👧‍👦🇪🇺", " \t\n\r\x00\x7f\u0080\ufeff ", "a  b   c", "<bo", "é" * 50]


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_bytes(text: str) -> None:
    assert TOKENIZER(text)["input_ids"] == [BOS, *text.encode()]
    assert TOKENIZER(text, add_special_tokens=False)["input_ids"] == list(text.encode())


@given(PLAIN_TEXT)
def test_round_trip(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert TOKENIZER.decode(ids, skip_special_tokens=True) == text


def test_special_tokens() -> None:
    assert (BOS, EOS, PAD) == (256, 257, 258)
    assert (TOKENIZER.bos_token_id, TOKENIZER.eos_token_id, TOKENIZER.pad_token_id) == (BOS, EOS, PAD)
    assert len(TOKENIZER) == 262
    assert TOKENIZER.convert_ids_to_tokens([256, 257, 258, 261]) == ["<bos>", "<eos>", "<pad>", "<unused261>"]
    assert TOKENIZER("a<eos>", add_special_tokens=False)["input_ids"] == [97, EOS]
    assert TOKENIZER.decode([97, 261, EOS, 98], skip_special_tokens=True) == "ab"
    as_bytes = TOKENIZER("<eos>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert as_bytes == list(b"<eos>")


def test_streamed_decoding_waits_for_whole_characters() -> None:
    """vLLM decodes output through DecodeStream, one token at a time."""
    stream = DecodeStream(skip_special_tokens=True)
    pieces = [stream.step(TOKENIZER.backend_tokenizer, token) for token in "é😀a".encode()]
    assert pieces == [None, "é", None, None, None, "😀", "a"]


def test_invalid_utf8_is_replaced() -> None:
    assert TOKENIZER.decode([0xFF, 97]) == "\ufffda"


def test_chat_template() -> None:
    messages = [{"role": "user", "content": "hi 😀"}, {"role": "assistant", "content": "yes"}]
    ids = TOKENIZER.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids == [BOS, *"user: hi 😀\nassistant: yes\nassistant: ".encode()]
    assert ids.count(BOS) == 1


def test_vocabulary_must_hold_the_bytes() -> None:
    assert len(byte_tokenizer(259, 512)) == 259
    with pytest.raises(ValueError, match="vocab_size=258: the byte tokenizer needs at least 259"):
        byte_tokenizer(258, 512)


# -- files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_save_and_load(dtype: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = YocoModelConfig(**SMALL, dtype=dtype)
    weights = random_state_dict(config, 1)
    save_checkpoint(tmp_path / "new" / "model", config, weights)
    directory = tmp_path / "new" / "model"
    assert {path.name for path in directory.iterdir()} == FILES
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1, "all readable by the same users"

    loaded, again = load_checkpoint(directory)
    expected = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    assert loaded.dtype == expected and loaded.architectures == ["YocoForCausalLM"]
    assert loaded.topology() == config.topology()
    assert {k: v for k, v in loaded.to_dict().items() if k in SMALL} == SMALL
    assert all(torch.equal(again[name], weights[name].to(expected)) for name in weights)

    tokenizer = AutoTokenizer.from_pretrained(directory)
    assert tokenizer("é😀")["input_ids"] == [BOS, *"é😀".encode()]
    assert tokenizer.decode("é😀".encode()) == "é😀"
    assert tokenizer.chat_template and tokenizer.model_max_length == 512
    generation = GenerationConfig.from_pretrained(directory)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (BOS, EOS, PAD)
    assert generation.do_sample in (None, False)


def test_loading_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no checkpoint here, it needs config.json and \*.safetensors"):
        load_checkpoint(tmp_path)


def test_weights_of_another_config_are_refused(tmp_path: Path) -> None:
    config = YocoModelConfig(**SMALL)
    weights = random_state_dict(config, 0)
    with pytest.raises(ValueError, match=r"weights do not fit the config: missing lm_head\.weight"):
        save_checkpoint(tmp_path / "m", config, {k: v for k, v in weights.items() if k != "lm_head.weight"})
    assert not (tmp_path / "m").exists()
    with pytest.raises(ValueError, match=r"and \d+ more"):
        save_checkpoint(tmp_path / "m", config, {})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a readable JSON file"),
        ("[]", "must hold a JSON object of model settings, not list"),
        ('{"model_type": "llama"}', "model_type='llama' must be 'yoco'"),
        ('{"n_prefil_layer": 3}', "unknown keys ['n_prefil_layer']"),
        ('{"n_prefill_layer": 0}', "n_prefill_layer=0"),
    ],
)
def test_bad_config_files(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        read_model_config(path)
    assert message in str(error.value) and str(error.value).startswith(str(path))


# -- presets and the command -----------------------------------------------------------------------------------


def test_presets_are_found_in_a_checkout_and_in_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"yoco", "ced", "ced-tiny", "v41-flash-shape"} <= model_presets().keys()
    for package in (tmp_path / "a" / "vllm_yoco", tmp_path / "b" / "vllm_yoco"):
        package.mkdir(parents=True)
        monkeypatch.setattr("vllm_yoco.presets.PACKAGE", package)
        assert model_presets() == {}
        with pytest.raises(ValueError, match="mine: neither a file nor a preset; presets are missing"):
            find_model_config("mine")
        folder = (package if package.parent.name == "a" else package.parent) / "configs" / "models"
        folder.mkdir(parents=True)
        (folder / "mine.json").write_text("{}")
        assert model_presets() == {"mine": folder / "mine.json"}
        assert find_model_config("mine") == folder / "mine.json"


def run(*args: object) -> int:
    return cli.main([str(arg) for arg in args])


def test_init_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    assert run("init-model", "ced-tiny", out, "--seed", 5) == 0
    config, weights = load_checkpoint(out)
    expected = random_state_dict(read_model_config(find_model_config("ced-tiny")), 5)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    printed = capsys.readouterr().out
    assert printed.splitlines() == [
        f"{out}: {parameter_count(config):,} parameters, 5.1 MB (float32), seed 5",
        "layers: producers 0-1; consumers 2-5; global KV from 2,4; SWA 2-5 (W 24, own input); K min 25, exact 93",
    ]


def test_init_model_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(SMALL | {"consumer_swa_layers": []}))
    assert run("init-model", path, tmp_path / "out") == 0
    assert "no SWA; K min 1, exact 1" in capsys.readouterr().out
    _, weights = load_checkpoint(tmp_path / "out")
    config = YocoModelConfig(**SMALL | {"consumer_swa_layers": []})
    assert torch.equal(weights["lm_head.weight"], random_state_dict(config, 0)["lm_head.weight"])


def test_init_model_protects_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model"
    out.mkdir()
    assert run("init-model", "ced-tiny", out) == 0, "an empty directory is fine"
    before = (out / "model.safetensors").read_bytes()
    capsys.readouterr()
    assert run("init-model", "ced-tiny", out, "--seed", 1) == 2
    output = capsys.readouterr()
    assert output.out == "" and output.err.count("\n") == 1
    assert "is not empty" in output.err and "--force" in output.err
    assert (out / "model.safetensors").read_bytes() == before
    assert run("init-model", "ced-tiny", out, "--seed", 1, "--force") == 0
    assert (out / "model.safetensors").read_bytes() != before
    (out / "model-00001-of-00002.safetensors").touch()
    assert run("init-model", "ced-tiny", out, "--force") == 2
    assert "holds other weights (model-00001-of-00002.safetensors)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["ced-huge", "out"], ["ced-huge: neither a file nor a preset", "ced-tiny"]),
        (["ced-tiny", "taken"], ["taken: is not a directory"]),
        (["ced-tiny", "out", "--seed", "-1"], ["--seed -1: must be 0 or more"]),
        (["bad.json", "out"], ["bad.json: unknown keys ['layers']"]),
    ],
)
def test_errors_are_one_line(
    args: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").touch()
    Path("bad.json").write_text('{"layers": 3}')
    assert run("init-model", *args) == 2
    error = capsys.readouterr().err
    assert error.startswith("vllm-yoco: error: ") and error.count("\n") == 1
    for part in parts:
        assert part in error
    assert not Path("out").exists()
    monkeypatch.setenv("VLLM_YOCO_DEBUG", "1")
    with pytest.raises(ValueError):
        run("init-model", *args)


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    for args, code in ((["--version"], 0), (["--help"], 0), (["init-model", "--help"], 0), (["nope"], 2)):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(args)
        assert exit_info.value.code == code
    output = capsys.readouterr()
    assert f"vllm-yoco {__version__}" in output.out
    assert "ced-tiny" in output.out, "the presets are named in the help"
    assert "nope" in output.err


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_has_a_module(command: str) -> None:
    module = importlib.import_module(f"vllm_yoco.tools.{cli.COMMANDS[command]}")
    assert module.HELP and callable(module.add_arguments) and callable(module.run)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vllm_yoco.tools.cli import COMMANDS, build_parser; build_parser(list(COMMANDS));"
        "print([m for m in ('torch', 'transformers', 'vllm') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
