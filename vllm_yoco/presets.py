"""The model configs that ship with the plugin, by name (the stem of the file)."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def model_presets() -> dict[str, Path]:
    """Preset name -> JSON file, in order of name; empty where the installation has none.

    In a wheel the ``configs`` folder is inside the package; in a checkout (editable install) it stands beside it.
    """
    for parent in (PACKAGE, PACKAGE.parent):
        folder = parent / "configs" / "models"
        if folder.is_dir():
            return {path.stem: path for path in sorted(folder.glob("*.json"))}
    return {}


def find_model_config(name_or_path: str) -> Path:
    """The JSON file that a preset name or a path means; an existing file wins over a preset.

    Raises:
        ValueError: for neither.
    """
    if Path(name_or_path).is_file():
        return Path(name_or_path)
    presets = model_presets()
    if name_or_path in presets:
        return presets[name_or_path]
    raise ValueError(f"{name_or_path}: neither a file nor a preset; presets are {', '.join(presets) or 'missing'}.")
