"""Pictures become the tensor that each family's own code makes of them.

The references are written with Pillow and numpy, as the families have it: torchvision's Resize, CenterCrop, ToTensor
and Normalize; Ultralytics' LetterBox; Keras' stretch. Tolerances are in levels of 0 to 255.
"""

from __future__ import annotations

import numpy as np
import pytest
from PIL import Image

from edge_runtime.backends.base import LoadOptions
from edge_runtime.backends.onnxruntime.backend import OnnxRuntimeBackend
from edge_runtime.errors import UnreadablePicture
from edge_runtime.hosts.steps_instance import make_forms
from edge_runtime.pictures.picture_steps import PictureSteps
from edge_runtime.pictures.pictures import open_picture
from edge_runtime.steps import Form, ModelSteps
from tests.models import onnx_models
from tests.pictures import encoded, photo, with_scans

MEAN, DEVIATION = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
"""torchvision's, of pixels / 255."""

TORCHVISION = {
    "fit": "crop",
    "shorter_side": 256,
    "mean": tuple(MEAN * 255),
    "scale": tuple(1 / (255 * DEVIATION)),
}

SIZES = [(640, 480), (480, 640), (1279, 721), (225, 901), (224, 224), (31, 17)]
"""Width and height: of cameras, odd, long, the model's own, and smaller than it."""


@pytest.fixture
def tensor_of(tmp_path):
    """Make tensors of what is sent: a model that gives its input back, with declared steps."""
    instances = []

    def ask(sent, given="picture", shape=("rows", 3, 224, 224), datatype="FP32", threads=1, **steps):
        folder = tmp_path / str(len(instances))
        instance = OnnxRuntimeBackend().load(onnx_models.picture_copy(folder, shape, datatype), LoadOptions())
        instances.append(instance)
        declared = ModelSteps({"image": PictureSteps(**steps)})
        (form,) = [each for each in make_forms(instance, declared, threads) if each.form == Form(given, answers=False)]
        (tensor,) = form.run({"image": pictures(*sent) if given == "picture" else sent})
        return tensor

    yield ask
    for instance in instances:
        instance.close()


def pictures(*files):
    """The BYTES tensor of these."""
    sent = np.empty(len(files), object)
    sent[:] = files
    return sent


def levels(tensor, mean=MEAN, deviation=DEVIATION):
    """A row of [3, height, width] back as levels, [height, width, 3]."""
    return (tensor.transpose(1, 2, 0) * deviation + mean) * 255


def torchvision_levels(pixels):
    """Resize(256), CenterCrop(224) as torchvision does with a Pillow image; levels as floats."""
    height, width = pixels.shape[:2]
    size = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR)
    left, top = round((size[0] - 224) / 2.0), round((size[1] - 224) / 2.0)
    return np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(np.float64)


def ultralytics_levels(pixels, side=640):
    """LetterBox(new_shape=side, auto=False): OpenCV's INTER_LINEAR, which takes four pixels and rounds."""
    height, width = pixels.shape[:2]
    scale = min(side / height, side / width)
    new_width, new_height = round(width * scale), round(height * scale)
    across, down = (side - new_width) / 2, (side - new_height) / 2
    left, top = round(across - 0.1), round(down - 0.1)
    canvas = np.full((side, side, 3), 114.0)
    x = np.clip((np.arange(new_width) + 0.5) * width / new_width - 0.5, 0, width - 1)
    y = np.clip((np.arange(new_height) + 0.5) * height / new_height - 0.5, 0, height - 1)
    x0, y0 = np.floor(x).astype(int), np.floor(y).astype(int)
    x1, y1 = np.minimum(x0 + 1, width - 1), np.minimum(y0 + 1, height - 1)
    right, below = (x - x0)[None, :, None], (y - y0)[:, None, None]
    values = pixels.astype(np.float64)
    above = values[y0][:, x0] * (1 - right) + values[y0][:, x1] * right
    under = values[y1][:, x0] * (1 - right) + values[y1][:, x1] * right
    canvas[top : top + new_height, left : left + new_width] = np.rint(above * (1 - below) + under * below)
    return canvas


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_torchvisions_crop_is_met_within_a_level(tensor_of, size):
    pixels = photo(*size)
    (row,) = tensor_of([encoded(pixels)], **TORCHVISION)
    off = np.abs(levels(row) - torchvision_levels(pixels))
    assert off.max() <= 1.001
    assert off.mean() < 0.4  # torchvision rounds after each axis


def test_torchvisions_normalize_is_met_within_a_millionth_of_a_deviation(tensor_of):
    pixels = photo(256, 256)[16:240, 16:240]
    steps = {**TORCHVISION, "fit": "stretch", "shorter_side": None}
    (row,) = tensor_of([encoded(pixels)], **steps)
    wanted = ((pixels.astype(np.float32) / 255 - MEAN.astype(np.float32)) / DEVIATION.astype(np.float32)).transpose(
        2, 0, 1
    )
    assert np.abs(row - wanted).max() < 2e-6


@pytest.mark.parametrize("size", [*SIZES, (1920, 1080), (640, 640)], ids=str)
def test_ultralytics_letterbox_is_met_within_a_level(tensor_of, size):
    pixels = photo(*size)
    steps = {"fit": "letterbox", "filter": "linear", "range": "0..1", "shape": ("rows", 3, 640, 640)}
    (row,) = tensor_of([encoded(pixels)], **steps)
    off = np.abs(row.transpose(1, 2, 0) * 255 - ultralytics_levels(pixels))
    assert off.max() <= 1.001


@pytest.mark.parametrize("kind", ["nearest", "bilinear", "bicubic", "lanczos"])
def test_a_stretched_picture_is_pillows_own(tensor_of, kind):
    pixels = photo(640, 480)
    (row,) = tensor_of([encoded(pixels)], fit="stretch", filter=kind, range="0..255")
    wanted = Image.fromarray(pixels).resize((224, 224), Image.Resampling[kind.upper()])
    off = np.abs(row - np.asarray(wanted).transpose(2, 0, 1))
    if kind == "nearest":  # each seventh column lies just between two pixels: Pillow's sum of steps takes either
        assert (off > 0).mean() < 0.1
    else:
        assert off.max() <= {"bilinear": 1, "bicubic": 4, "lanczos": 8}[kind]
        assert off.mean() < 0.5


def test_channels_last_bgr_and_keras_range(tensor_of):
    pixels = photo(320, 240)
    steps = {"shape": ("rows", 240, 320, 3), "color": "bgr", "range": "-1..1"}
    (row,) = tensor_of([encoded(pixels)], **steps)
    np.testing.assert_allclose(row, pixels[:, :, ::-1] / 127.5 - 1, atol=1e-6)


def test_gray_is_pillows_luma(tensor_of):
    pixels = photo(32, 28)
    (row,) = tensor_of([encoded(pixels)], shape=("rows", 1, 28, 32), color="gray", range="0..1")
    np.testing.assert_allclose(row[0] * 255, np.asarray(Image.fromarray(pixels).convert("L")), atol=1e-3)


def test_a_model_of_gray_pixels_in_one_line_takes_pictures_where_their_size_is_said(tensor_of):
    pixels = photo(32, 28)
    steps = {"shape": ("rows", 28 * 32), "color": "gray", "range": "0..1", "size": (28, 32)}
    (row,) = tensor_of([encoded(pixels)], **steps)
    wanted = np.asarray(Image.fromarray(pixels).convert("L"))
    np.testing.assert_allclose(row.reshape(28, 32) * 255, wanted, atol=1e-3)


@pytest.mark.parametrize("datatype", ["UINT8", "INT8", "FP16"])
def test_other_datatypes_get_the_nearest_number(tensor_of, datatype):
    pixels = photo(24, 16)
    steps = {"UINT8": {}, "INT8": {"mean": (128,), "scale": (1.0,)}, "FP16": {"range": "0..1"}}[datatype]
    (row,) = tensor_of([encoded(pixels)], shape=("rows", 16, 24, 3), datatype=datatype, **steps)
    wanted = {"UINT8": pixels, "INT8": pixels.astype(int) - 128, "FP16": (pixels / 255).astype(np.float16)}[datatype]
    np.testing.assert_array_equal(row, wanted)


def test_fill_lies_around_a_letterboxed_picture_by_channel(tensor_of):
    steps = {"shape": ("rows", 3, 8, 8), "fit": "letterbox", "fill": (10, 20, 30), "range": "0..255"}
    (row,) = tensor_of([encoded(np.full((4, 8, 3), 255, np.uint8))], **steps)
    assert row[:, 0, 0].tolist() == row[:, 7, 7].tolist() == [10, 20, 30]
    assert (row[:, 2:6] == 255).all()


def test_a_picture_smaller_than_what_is_cut_out_is_scaled_up_first(tensor_of):
    (row,) = tensor_of([encoded(np.full((1, 3, 3), 7, np.uint8))], fit="crop", range="0..255")
    np.testing.assert_allclose(row, 7, atol=1e-5)


@pytest.mark.parametrize("shape", [(65_000, 1, 3), (1, 65_000, 3)])
def test_a_picture_of_extreme_shape_costs_what_another_does(tensor_of, shape):
    """Scaled whole, its longer side would have 16 million pixels."""
    thin = np.full(shape, 9, np.uint8)
    for steps in (TORCHVISION, {"fit": "letterbox", "fill": (9,), "range": "0..255"}, {"range": "0..255"}):
        (row,) = tensor_of([encoded(thin)], **steps)
        assert np.ptp(row, axis=(1, 2)).max() < 1e-4


@pytest.mark.parametrize("kind", ["linear", "bilinear", "bicubic"])
def test_a_wide_picture_is_scaled_as_a_high_one_is(tensor_of, kind):
    wide = photo(3_000, 200)
    steps = {"shape": ("rows", 3, 224, 160), "fit": "letterbox", "filter": kind, "range": "0..255"}
    (row,) = tensor_of([encoded(wide)], **steps)
    turned = {**steps, "shape": ("rows", 3, 160, 224)}
    (high,) = tensor_of([encoded(np.ascontiguousarray(wide.transpose(1, 0, 2)))], **turned)
    np.testing.assert_allclose(row, high.transpose(0, 2, 1), atol=2e-3)


def test_a_side_that_no_jpeg_has_is_refused(tensor_of):
    long = np.zeros((1, 70_000, 3), np.uint8)
    for sent, given in (([encoded(long)], "picture"), (long[None], "frames")):
        with pytest.raises(UnreadablePicture, match="70000 x 1; at most 65536 pixels a side"):
            tensor_of(sent, given, range="0..1")


# ---- kinds of pictures ----------------------------------------------------------------------------------------------


COLOURS = {"shape": ("rows", 2, 2, 3), "datatype": "UINT8"}


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
def test_a_picture_is_taken_upright_as_its_exif_says(tensor_of, orientation, kind):
    upright = np.zeros((16, 16, 3), np.uint8)
    upright[:8, :8] = [255, 0, 0]
    upright[8:, :8] = [0, 255, 0]
    stored = {
        1: upright, 2: upright[:, ::-1], 3: upright[::-1, ::-1], 4: upright[::-1], 5: upright.transpose(1, 0, 2),
        6: np.rot90(upright), 7: np.rot90(upright, 2).transpose(1, 0, 2), 8: np.rot90(upright, -1),
    }[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    sent = encoded(np.ascontiguousarray(stored), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {}))
    (row,) = tensor_of([sent], filter="nearest", **COLOURS)
    assert np.abs(row.astype(int) - upright[::8, ::8]).max() <= 20


def test_exif_that_cannot_be_read_turns_nothing(tensor_of):
    pixels = photo(16, 16)
    sent = encoded(pixels, "PNG", exif=b"Exif\0\0II*\0\xff\xff\xff\xff" + bytes(range(200)))
    (row,) = tensor_of([sent], shape=("rows", 16, 16, 3), datatype="UINT8")
    np.testing.assert_array_equal(row, pixels)


def _odd_pictures():
    red = (200, 0, 0)
    palette = Image.new("P", (2, 2), 1)
    palette.putpalette([0, 0, 0, *red] + [0] * 762)
    deep = Image.fromarray(np.full((2, 2), 200 << 8 | 255, np.uint16))
    return {
        "palette": (encoded(palette), red),
        "palette with transparency": (encoded(palette, transparency=bytes([255, 0])), red),
        "alpha is dropped": (encoded(Image.new("RGBA", (2, 2), (*red, 0))), red),
        "WebP with alpha": (encoded(Image.new("RGBA", (2, 2), (*red, 255)), "WEBP", lossless=True), red),
        "gray": (encoded(Image.new("L", (2, 2), 77)), (77, 77, 77)),
        "gray with alpha": (encoded(Image.new("LA", (2, 2), (77, 3))), (77, 77, 77)),
        "black and white": (encoded(Image.new("1", (2, 2), 1)), (255, 255, 255)),
        "16 bits": (encoded(deep), (200, 200, 200)),
        "CMYK": (encoded(Image.new("CMYK", (2, 2), (0, 255, 255, 55)), "JPEG", quality=100), red),
        "BMP": (encoded(Image.new("RGB", (2, 2), red), "BMP"), red),
        "GIF": (encoded(palette, "GIF"), red),
    }


@pytest.mark.parametrize("name", list(_odd_pictures()))
def test_each_kind_of_picture_has_a_defined_meaning(tensor_of, name):
    sent, colour = _odd_pictures()[name]
    (row,) = tensor_of([sent], **COLOURS)
    assert np.abs(row.astype(int) - colour).max() <= 2


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "MPO"])
def test_of_several_frames_the_first_is_taken(tensor_of, kind):
    first, second = (Image.new("RGB", (8, 8), colour) for colour in ("red", "blue"))
    sent = encoded(first, kind, save_all=True, append_images=[second, second])
    (row,) = tensor_of([sent], **COLOURS)
    assert np.abs(row.astype(int) - (255, 0, 0)).max() <= 3


# ---- raw frames -----------------------------------------------------------------------------------------------------


def yuv(rgb):
    """BT.601 of limited range, as floats: Y, U, V."""
    red, green, blue = rgb[..., 0] / 255.0, rgb[..., 1] / 255.0, rgb[..., 2] / 255.0
    luma = 16 + 65.481 * red + 128.553 * green + 24.966 * blue
    return luma, 128 - 37.797 * red - 74.203 * green + 112 * blue, 128 + 112 * red - 93.786 * green - 18.214 * blue


def blocks(width=64, height=48):
    """A picture whose colours change at even places only, so that halved chroma loses nothing."""
    return np.random.default_rng(3).integers(0, 256, (height // 4, width // 4, 3), np.uint8).repeat(4, 0).repeat(4, 1)


def as_nv12(rgb):
    luma, blue, red = (np.rint(plane).astype(np.uint8) for plane in yuv(rgb))
    colours = np.stack([blue[::2, ::2], red[::2, ::2]], axis=2)
    return np.concatenate([luma, colours.reshape(len(luma) // 2, -1)])[None]


def as_yuyv(rgb):
    luma, blue, red = (np.rint(plane).astype(np.uint8) for plane in yuv(rgb))
    colours = np.stack([blue[:, ::2], red[:, ::2]], axis=2).reshape(luma.shape)
    return np.stack([luma, colours], axis=2)[None]


@pytest.mark.parametrize(("source", "made"), [("nv12", as_nv12), ("yuyv", as_yuyv)])
def test_frames_of_cameras_are_converted_within_four_levels(tensor_of, source, made):
    rgb = blocks()
    steps = {"from": source, "shape": ("rows", 48, 64, 3), "datatype": "UINT8"}
    (row,) = tensor_of(made(rgb), "frames", source=steps.pop("from"), **steps)
    assert np.abs(row.astype(int) - rgb).max() <= 4


def test_gray_frames_are_pictures(tensor_of):
    frames = photo(32, 24)[None, :, :, :1]
    for source in ("gray", "frames", "picture"):
        (row,) = tensor_of(frames, "frames", source=source, shape=("rows", 1, 24, 32), color="gray", range="0..255")
        np.testing.assert_array_equal(row, frames[0].transpose(2, 0, 1))
    (row,) = tensor_of(frames, "frames", source="gray", shape=("rows", 24, 32, 3), range="0..255")
    np.testing.assert_array_equal(row, np.repeat(frames[0], 3, axis=2))


def test_a_frame_is_what_the_same_picture_is(tensor_of):
    pixels = photo()
    frame = tensor_of(np.stack([pixels, pixels[::-1]]), "frames", **TORCHVISION)
    np.testing.assert_array_equal(frame, tensor_of([encoded(pixels), encoded(pixels[::-1])], **TORCHVISION))


@pytest.mark.parametrize(
    ("source", "shape", "said"),
    [
        ("nv12", (1, 50, 64), "height \\* 3 / 2 lines"),
        ("nv12", (1, 48, 63), "even width"),
        ("yuyv", (1, 48, 63, 2), "even width"),
        ("frames", (1, 0, 64, 3), "empty"),
        ("gray", (1, 5, 0, 1), "empty"),
        ("frames", (1, 5, 5, 4), "4 channels; wanted 3"),
        ("frames", (0, 5, 5, 3), "no picture"),
    ],
)
def test_a_frame_of_other_lengths_is_refused(tensor_of, source, shape, said):
    with pytest.raises(UnreadablePicture, match=said):
        tensor_of(np.zeros(shape, np.uint8), "frames", source=source, range="0..1")


def test_pictures_of_one_batch_are_decoded_by_the_threads_of_a_run(tensor_of):
    sent = [encoded(photo(60 + 20 * index, 50, index)) for index in range(7)]
    np.testing.assert_array_equal(tensor_of(sent, threads=3, **TORCHVISION), tensor_of(sent, **TORCHVISION))
    with pytest.raises(UnreadablePicture, match="no picture can be read"):
        tensor_of([*sent, b"bad"], threads=3, **TORCHVISION)


# ---- bounds ---------------------------------------------------------------------------------------------------------


def test_a_bomb_is_refused_by_its_head(tensor_of):
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    def png(width, height):
        head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
        return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1 << 16)))

    for side in (8_200, 12_000, 60_000):
        with pytest.raises(UnreadablePicture, match="at most 67108864 are decoded"):
            tensor_of([png(side, side)], range="0..1")
    with pytest.raises(UnreadablePicture, match="no picture can be read"):  # it lies about its size
        tensor_of([png(4_000, 4_000)], range="0..1")


@pytest.mark.parametrize(("width", "height", "scans"), [(640, 480, 500), (1_920, 1_080, 400), (4_000, 3_000, 40)])
def test_a_progressive_jpeg_of_many_scans_is_read_as_one_of_few(width, height, scans):
    few = encoded(np.full((height, width, 3), 90, np.uint8), "JPEG", progressive=True)
    np.testing.assert_array_equal(open_picture(with_scans(few, scans), "rgb"), open_picture(few, "rgb"))


@pytest.mark.parametrize(("width", "height", "scans"), [(64, 48, 501), (1_000, 1_000, 3_000), (4_000, 3_000, 90)])
def test_a_jpeg_whose_scans_go_over_its_pixels_too_often_is_refused_by_its_markers(width, height, scans):
    jpeg = with_scans(encoded(np.full((height, width, 3), 90, np.uint8), "JPEG", progressive=True), scans)
    with pytest.raises(UnreadablePicture, match=r"has over .* scans .* Save it with fewer"):
        open_picture(jpeg, "rgb")


@pytest.mark.parametrize("filler", [b"\xff\x02", b"\xff\xd8", b"\xff" * 9, b"\xff\x00", b"\xff\xd0"])
def test_no_filler_between_scans_hides_them(filler):
    pixels = np.full((64, 64, 3), 90, np.uint8)
    jpeg = with_scans(encoded(pixels, "JPEG", progressive=True, restart_marker_blocks=1), 40)
    head, *scans = jpeg[:-2].split(b"\xff\xda")
    jpeg = head + b"".join(b"\xff\xda" + scan + filler for scan in scans * 20)
    with pytest.raises(UnreadablePicture, match=r"has over .* scans"):
        open_picture(jpeg, "rgb")


def test_bytes_beside_a_jpeg_that_look_like_scans_are_none():
    jpeg = encoded(photo(64, 48), "JPEG", comment=b"\xff\xda" * 2_000)
    np.testing.assert_array_equal(open_picture(jpeg + b"\xff\xda" * 2_000, "rgb"), open_picture(jpeg, "rgb"))


def run_lengths(width, height, runs):
    """A BMP of 8 bits by run lengths. Source: BITMAPINFOHEADER, BI_RLE8."""
    import struct

    head = struct.pack("<IiiHHIIiiII", 40, width, height, 1, 8, 1, len(runs), 0, 0, 256, 0) + bytes(1024)
    return b"BM" + struct.pack("<IHHI", 14 + len(head) + len(runs), 0, 0, 14 + len(head)) + head + runs


def slow_png():
    import struct
    import zlib

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head, profile = struct.pack(">IIBBBBB", 1, 1, 8, 2, 0, 0, 0), zlib.compress(bytes((1 << 20) - 16))
    chunks = chunk(b"iCCP", b"icc\0\0" + profile) * 5_000
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunks + chunk(b"IDAT", zlib.compress(bytes(4)))


def slow_jpeg():
    whole = encoded(photo(16, 16), "JPEG")
    return whole[:2] + b"\xff\xe1\0\x09Exif\0\0a" * 600_000 + whole[2:]


@pytest.mark.parametrize(
    "make", [slow_png, slow_jpeg, lambda: run_lengths(6_000, 6_000, b"\1\5" * 12_000_000)], ids=["PNG", "JPEG", "BMP"]
)
def test_a_picture_that_takes_longer_than_any_of_its_size_is_given_up(make):
    with pytest.raises(UnreadablePicture, match=r"took 1\.0 s, longer than any of its size does"):
        open_picture(make(), "rgb")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
def test_a_cut_picture_is_refused(tensor_of, kind):
    whole = encoded(photo(64, 48), kind)
    for part in (0.1, 0.5, 0.9):
        with pytest.raises(UnreadablePicture, match="no picture can be read"):
            tensor_of([whole[: int(len(whole) * part)]], range="0..1")


@pytest.mark.parametrize(
    ("sent", "name"),
    [
        (encoded(photo(8, 8), "TIFF"), "TIFF"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b'  <?xml version="1.0"?><svg/>', "SVG"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIF"),
        (b"%PDF-1.7", "PDF"),
    ],
)
def test_other_kinds_are_refused_by_name(tensor_of, sent, name):
    with pytest.raises(UnreadablePicture, match=f"{name}.* not read; wanted JPEG, PNG, WEBP, BMP, GIF"):
        tensor_of([sent], range="0..1")


# ---- light as dark --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("numbers", [{"range": "0..1"}, {"range": "-1..1"}, {"mean": (255,), "scale": (-0.0627451,)}])
def test_dark_on_light_becomes_the_numbers_of_light_on_dark(tensor_of, numbers):
    ink = np.linspace(0, 255, 64, dtype=np.uint8).reshape(8, 8)
    shape = ("rows", 1, 8, 8)
    black_on_white, white_on_black = ((each[None, :, :, None]) for each in (ink, 255 - ink))
    inverted = tensor_of(black_on_white, "frames", shape, color="gray", invert=True, **numbers)
    plain = tensor_of(white_on_black, "frames", shape, color="gray", **numbers)
    assert inverted == pytest.approx(plain, abs=4e-6)  # of numbers up to 16


def test_whole_pixels_are_inverted_too_and_what_is_around_a_picture_is_as_the_picture(tensor_of):
    paper = np.full((1, 8, 4, 1), 255, np.uint8)
    shape = ("rows", 1, 8, 8)
    keys = {"color": "gray", "invert": True, "fit": "letterbox", "fill": (255,)}
    assert not tensor_of(paper, "frames", shape, "UINT8", **keys).any()
    assert not tensor_of(paper, "frames", shape, range="0..1", **keys).any()
