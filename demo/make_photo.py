"""Makes seven.jpg: a held-out digit as a camera sees it, dark ink on paper in uneven light. Its picture is kept.

python -m demo.make_photo
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from demo.digits import load_held_out

PHOTO_FILE = Path(__file__).with_name("seven.jpg")
ROW = 1
"""Of the held-out images: a seven."""
WIDTH, HEIGHT = 640, 480


def main() -> None:
    """Draw it."""
    ink = load_held_out().images[ROW].reshape(8, 8).astype(np.float32) / 16
    drawn = Image.fromarray((ink * 255).astype(np.uint8)).resize((HEIGHT, HEIGHT), Image.Resampling.BICUBIC)
    mask = np.zeros((HEIGHT, WIDTH), np.float32)
    left = (WIDTH - HEIGHT) // 2
    mask[:, left : left + HEIGHT] = np.asarray(drawn, np.float32) / 255
    y, x = np.mgrid[0:HEIGHT, 0:WIDTH]
    light = 1 - 0.12 * (x / WIDTH) - 0.06 * (y / HEIGHT)
    grain = np.random.default_rng(7).normal(0, 3, (HEIGHT, WIDTH))
    paper, blue = np.array([246, 243, 232], np.float32), np.array([28, 36, 70], np.float32)
    seen = (paper + (blue - paper) * mask[:, :, None]) * light[:, :, None] + grain[:, :, None]
    Image.fromarray(np.clip(seen, 0, 255).astype(np.uint8)).save(PHOTO_FILE, quality=82)


if __name__ == "__main__":
    main()
