"""Files of the ``configs`` folder: at the top of a checkout (editable install), inside the package in a wheel."""

from __future__ import annotations

from pathlib import Path

PACKAGE = Path(__file__).parent


def configs_folder(kind: str = "models") -> Path:
    """The folder ``configs/<kind>``.

    Raises:
        ValueError: if the installation has none.
    """
    for folder in (PACKAGE / "configs" / kind, PACKAGE.parent / "configs" / kind):
        if folder.is_dir():
            return folder
    raise ValueError(f"configs/{kind}: not part of this installation; give the path of a file instead of a name.")


def preset_names(kind: str = "models") -> list[str]:
    """Names of the presets of a kind, which are the stems of its JSON files."""
    return sorted(path.stem for path in configs_folder(kind).glob("*.json"))


def find_preset(name_or_path: str, kind: str = "models") -> Path:
    """The JSON file that a preset name or a path means; an existing file wins over a preset.

    Raises:
        ValueError: for neither.
    """
    if Path(name_or_path).is_file():
        return Path(name_or_path)
    if name_or_path in preset_names(kind):
        return configs_folder(kind) / f"{name_or_path}.json"
    raise ValueError(
        f"{name_or_path}: neither a file nor a preset; presets are {', '.join(preset_names(kind))}."
    )
