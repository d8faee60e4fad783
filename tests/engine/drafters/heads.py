"""Every method's weights for a tiny target, in the layouts that the method reads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from engine.model.target import Target
from tests.engine.drafters import test_assistant, test_dflash, test_dspark, test_p_eagle
from tests.engine.drafters.eagle_heads import save_eagle, save_eagle3
from tests.engine.drafters.fitted import save_medusa, save_redrafter


def save_head(method: str, folder: Path, target: Target) -> str | None:
    """A folder with the weights of a method (`decoding_type`); None where it has none."""
    draft_vocab = min(64, target.vocab_size // 2)
    makers: dict[str, Callable[[], object]] = {
        "Medusa": lambda: save_medusa(folder, target, num_heads=4),
        "ReDrafter": lambda: save_redrafter(folder, target),
        "Eagle": lambda: save_eagle(folder, target),
        "Eagle3": lambda: save_eagle3(folder, target, (1, 2, 3), draft_vocab=draft_vocab),
        "P_EAGLE": lambda: test_p_eagle.save_parallel(folder, target),
        "DFlash": lambda: test_dflash.save_as_published(folder, vocab_size=target.vocab_size),
        "DSpark": lambda: test_dspark.save(folder, vocab=target.vocab_size),
        "MTP_Assistant": lambda: test_assistant.save_assistant(folder, target),
    }
    return str(makers[method]() and folder) if method in makers else None
