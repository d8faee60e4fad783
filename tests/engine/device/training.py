"""The loss of every trainable method's first step, on the processor and on the device, as JSON.

python -m tests.engine.device.training FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from engine.training.methods import METHODS
from engine.training.trainer import Trainer
from tests.engine.device.pretend import pretend_device
from tests.engine.methods import moved
from tests.engine.training.conftest import grow, learnable_target
from tests.engine.training.test_training import settings


def main(folder: Path) -> None:
    own, losses = learnable_target(), dict[str, list[float]]()
    *_, corpus = grow(own, folder / "corpus", num_tokens=1200, rows=8)
    with pretend_device() as device:
        for method in METHODS:
            for target in (own, moved(own, device)):
                into = folder / f"{method}-{target.device.type}"
                trainer = Trainer(target, corpus, settings(method), into)
                outputs = trainer._one_step()  # `steps` would save it
                mean = sum(float(one.loss) for one in outputs) / len(outputs)
                losses.setdefault(method, []).append(mean)
    print(json.dumps(losses))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
