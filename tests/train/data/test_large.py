"""Large images: what ranks read of their tiles is the window, and no more is decoded than that takes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from typer.testing import CliRunner

from echelon.parallel.loss import IGNORED
from echelon.train.data import images, large
from echelon.train.data.command import data_app
from echelon.train.data.errors import DataError
from echelon.train.data.images import Image, find_classes
from echelon.train.data.large import LargeImages, find_large_images, find_masks
from echelon.train.data.pathology import Kind, Slide, painted_bytes, write_set
from echelon.train.data.source import WHOLE, Tile

pytest.importorskip("PIL")
tifffile: Any = pytest.importorskip("tifffile")

FORMATS: dict[str, dict[str, Any]] = {
    "tiles.tif": {"tile": (32, 48)},
    "tiles-deflate.tif": {"tile": (32, 32), "compression": "zlib"},
    "tiles-predicted.tif": {"tile": (48, 16), "compression": "zlib", "predictor": True},
    "strips.tiff": {"rowsperstrip": 7},
    "strips-deflate.tif": {"rowsperstrip": 10, "compression": "zlib"},
    "planes.tif": {"tile": (32, 32), "compression": "zlib", "planarconfig": "separate"},
    "one.PNG": {},
}
ZERO = np.array([0])


def random_pixels(height: int, width: int, *samples: int, seed: int = 0, most: int = 256) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, most, (height, width, *samples), np.uint8)


def write(path: Path, pixels: NDArray[Any], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix.lower() == ".png":
        images.pillow().fromarray(pixels).save(path)
    else:
        colours = "rgb" if pixels.ndim == 3 and 3 in (pixels.shape[0], min(pixels.shape[-1], 3)) else "minisblack"
        tifffile.imwrite(path, pixels, photometric=colours, **options)
    return path


def write_as(path: Path, pixels: NDArray[np.uint8]) -> Path:
    options = FORMATS[path.name]
    if "planarconfig" in options:
        if pixels.ndim == 2:
            options = options | {"planarconfig": None}
        else:
            pixels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
    return write(path, pixels, **options)


def unnormalised(images_CHW: Tensor) -> NDArray[np.uint8]:
    mean, deviation = (torch.tensor(v)[: len(images_CHW)] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    pixels = (images_CHW.permute(1, 2, 0) * deviation + mean) * 255
    return pixels.round().to(torch.uint8).numpy()


def put_together(source: LargeImages, name: str, epoch: int, down: int, across: int) -> Tensor:
    rows = []
    for i in range(down):
        tiles: list[Tile] = [((i, down), (j, across)) for j in range(across)]
        rows.append(torch.cat([source.batch(ZERO, np.array([epoch]), tile, tile)[name] for tile in tiles], -1))
    return torch.cat(rows, -2)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("channels", [1, 3])
def test_tiles_put_together_are_the_window(tmp_path: Path, name: str, channels: int) -> None:
    """Trained (with mirrored ones among the epochs) and evaluated; the middle is what it says."""
    shape = (3,) if channels == 3 else ()
    pixels = random_pixels(101, 117, *shape)
    image = Image(write_as(tmp_path / name, pixels), 0)
    for seed, epochs in ((None, 1), (0, 4)):
        source = LargeImages([image], 61, channels, seed)
        for epoch in range(epochs):
            whole = source.batch(ZERO, np.array([epoch]))["images_BCHW"]
            assert whole.shape == (1, channels, 61, 61)
            for down, across in ((1, 2), (2, 1), (2, 2), (3, 4), (7, 1)):
                assert torch.equal(put_together(source, "images_BCHW", epoch, down, across), whole)
    middle = LargeImages([image], 61, channels, None).batch(ZERO, ZERO)["images_BCHW"][0]
    assert (unnormalised(middle) == pixels[20:81, 28:89].reshape(61, 61, channels)).all()


def test_tiles_may_be_empty(tmp_path: Path) -> None:
    for name in ("tiles.tif", "one.PNG"):
        source = LargeImages([Image(write_as(tmp_path / name, random_pixels(8, 9)), 0)], 3, 1, 0)
        whole = source.batch(ZERO, ZERO)["images_BCHW"]
        assert torch.equal(put_together(source, "images_BCHW", 0, 5, 4), whole)


def places(folder: Path) -> Image:
    """Each pixel tells where it stands."""
    rows, columns = np.mgrid[0:90, 0:120].astype(np.uint8)
    return Image(write(folder / "places.tif", np.stack([rows, columns, rows], -1), tile=(32, 32)), 0)


def test_windows_are_a_hash_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    source = LargeImages([places(tmp_path)] * 2, 40, 3, 0)
    epochs = np.arange(200)
    windows = source.batch(epochs * 0, epochs)["images_BCHW"]
    seen = np.stack([unnormalised(window) for window in windows]).astype(int)
    mirrored = seen[:, 0, 0, 1] > seen[:, 0, -1, 1]
    assert 0.4 < mirrored.mean() < 0.6
    assert (np.abs(np.diff(seen[..., 1], axis=2)) == 1).all()
    uppers, lefts = seen[:, 0, 0, 0], seen[..., 1].min((1, 2))
    assert (uppers.min(), uppers.max()) == (0, 50)
    assert lefts.min() <= 3
    assert 77 <= lefts.max() <= 80
    assert torch.equal(source.batch(np.array([0]), np.array([5]))["images_BCHW"][0], windows[5])
    other = source.batch(np.array([1]), np.array([5]))["images_BCHW"][0]
    another = LargeImages(source.images, 40, 3, 1).batch(np.array([0]), np.array([5]))["images_BCHW"][0]
    assert not torch.equal(other, windows[5])
    assert not torch.equal(another, windows[5])


def test_an_image_of_just_the_size(tmp_path: Path) -> None:
    pixels = random_pixels(64, 64)
    image = Image(write_as(tmp_path / "tiles.tif", pixels), 0)
    seen = unnormalised(LargeImages([image], 64, 1, 0).batch(ZERO, ZERO)["images_BCHW"][0])[..., 0]
    assert (seen == pixels).all() or (seen == pixels[:, ::-1]).all()


def test_normalised_as_other_images(tmp_path: Path) -> None:
    pixels = random_pixels(64, 64, 3)
    pixels[:] = pixels[0, 0]
    image = Image(write(tmp_path / "a" / "one.png", pixels), 1)
    for channels in (1, 3):
        large_ = LargeImages([image], 32, channels, None).batch(ZERO, ZERO)
        small = images.ImageFolder([image], 32, channels, None).batch(ZERO, ZERO)
        assert torch.allclose(large_["images_BCHW"], small["images_BCHW"], atol=0.02)
        assert large_["targets_B"].tolist() == small["targets_B"].tolist() == [1]


@pytest.mark.parametrize("name", ["tiles.tif", "one.PNG"])
def test_colours_and_opacity_are_as_the_model_wants(tmp_path: Path, name: str) -> None:
    rgba = random_pixels(40, 40, 4)
    image = Image(tmp_path / name, 0)
    write(image.path, rgba, **FORMATS[name])
    seen = unnormalised(LargeImages([image], 40, 3, None).batch(ZERO, ZERO)["images_BCHW"][0])
    assert (seen == rgba[..., :3]).all()
    write(image.path, rgba[..., 0], **FORMATS[name])
    seen = unnormalised(LargeImages([image], 40, 3, None).batch(ZERO, ZERO)["images_BCHW"][0])
    assert (seen == rgba[..., :1]).all()


def test_classes_by_folder(tmp_path: Path) -> None:
    for place, name in enumerate(("a/1.tif", "b/2.png", "b/3.TIFF")):
        write(tmp_path / name, random_pixels(20, 20, seed=place))
    source = LargeImages(find_large_images(tmp_path, find_classes(tmp_path, 2)), 20, 1, None)
    assert len(source) == 3
    assert source.batch(np.arange(3), np.zeros(3, np.int64))["targets_B"].tolist() == [0, 1, 1]
    (tmp_path / "a" / "2.jpg").write_bytes(b"")
    with pytest.raises(DataError, match=r"2\.jpg is neither PNG nor TIFF: save large images as tiled TIFF"):
        find_large_images(tmp_path, {"a": 0})


def write_masked(folder: Path, count: int = 3) -> None:
    """The red of a pixel is the number of its class."""
    for number in range(count):
        suffix = ("tif", "png", "tiff")[number % 3]
        mask = random_pixels(80, 90, seed=number, most=5)
        mask[random_pixels(80, 90, seed=9) < 30] = 255
        write(folder / "images" / f"{number}.{suffix}", np.stack([mask] * 3, -1))
        write(folder / "masks" / f"{number}.{('png', 'tif')[number % 2]}", mask)


def test_masks_go_with_their_images(tmp_path: Path) -> None:
    write_masked(tmp_path)
    masks = find_masks(tmp_path)
    for seed in (None, 0):
        source = LargeImages([Image(path, 0) for path in masks], 50, 3, seed, masks, 5)
        for tile in (WHOLE, ((1, 2), (2, 3))):
            given = source.batch(np.tile(np.arange(3), 3), np.repeat(np.arange(3), 3), tile, tile)
            targets_BHW = given["targets_BHW"]
            assert targets_BHW.dtype == torch.int64
            assert targets_BHW.shape == given["images_BCHW"][:, 0].shape
            seen = np.stack([unnormalised(image) for image in given["images_BCHW"]])[..., 0].astype(int)
            assert (np.where(seen == 255, IGNORED, seen) == targets_BHW.numpy()).all()
        without = source.batch(ZERO, ZERO + 1, None)
        assert without["images_BCHW"].is_meta
        assert without["images_BCHW"].shape == (1, 3, 50, 50)
        whole = source.batch(ZERO, ZERO + 1)["targets_BHW"]
        assert torch.equal(without["targets_BHW"], whole)
        assert torch.equal(put_together(source, "targets_BHW", 1, 3, 2), whole)


def test_masks_with_a_palette_hold_the_numbers_of_classes(tmp_path: Path) -> None:
    mask = random_pixels(40, 40, most=3)
    (tmp_path / "masks").mkdir()
    paletted = images.pillow().fromarray(mask).convert("P")
    paletted.putpalette([10, 20, 30, 40, 50, 60, 70, 80, 90])
    paletted.save(tmp_path / "masks" / "a.png", bits=2)
    write(tmp_path / "images" / "a.tif", mask)
    masks = find_masks(tmp_path)
    source = LargeImages([Image(path, 0) for path in masks], 40, 1, None, masks, 3)
    assert (source.batch(ZERO, ZERO)["targets_BHW"][0].numpy() == mask).all()
    with pytest.raises(DataError, match=r"a\.png has a palette of colours: save it as RGB"):
        LargeImages([Image(tmp_path / "masks" / "a.png", 0)], 40, 3, None).batch(ZERO, ZERO)


def test_masks_that_do_not_fit(tmp_path: Path) -> None:
    write_masked(tmp_path, 1)
    masks = find_masks(tmp_path)
    [(image, mask)] = masks.items()

    def read() -> None:
        LargeImages([Image(image, 0)], 50, 3, None, masks, 4).batch(ZERO, ZERO)

    with pytest.raises(DataError, match=r"masks/0\.png has class 4, but the model 4: set \[model\] classes"):
        read()
    write(mask, random_pixels(80, 90, 3))
    with pytest.raises(DataError, match="is a mask with colours: save one 8-bit number a pixel"):
        read()
    write(mask, random_pixels(81, 90))
    with pytest.raises(DataError, match="has 81 x 90 pixels, but its image 80 x 90"):
        read()
    images.pillow().fromarray(random_pixels(80, 90, most=2).astype(bool)).save(mask)
    with pytest.raises(DataError, match="has samples of other than 8 bits: save it with 8"):
        read()
    mask.unlink()
    with pytest.raises(DataError, match=r"images/0\.tif has no mask: it would be .*masks/0\.png, \.tif or \.tiff"):
        find_masks(tmp_path)
    write(tmp_path / "images" / "0.png", random_pixels(8, 8))
    with pytest.raises(DataError, match=r"0\.png and .*0\.tif have the same name"):
        find_masks(tmp_path)
    with pytest.raises(DataError, match=r"there is no folder .*masks/images: images are in FOLDER/images, their masks"):
        find_masks(tmp_path / "masks")


@pytest.mark.parametrize("options", [{"tile": (64, 64)}, {"rowsperstrip": 16}], ids=["tiles", "strips"])
@pytest.mark.parametrize("compression", [None, "zlib"])
def test_a_tile_takes_no_more_segments_than_it_meets(
    tmp_path: Path, options: dict[str, Any], compression: str | None
) -> None:
    """All others are made unreadable."""
    image = Image(write(tmp_path / "a.tif", random_pixels(512, 512, 3), compression=compression, **options), 0)
    source = LargeImages([image], 500, 3, None)
    tile: Tile = ((1, 4), (2, 4))
    before = source.batch(ZERO, ZERO, tile)
    with tifffile.TiffFile(image.path) as file:
        page = file.pages.first
        needed = large.Tiff(page).segments(range(131, 256), range(256, 381))
        places = [*zip(page.dataoffsets, page.databytecounts, strict=True)]
    assert len(needed) == (4 if "tile" in options else 8)
    assert sum(places[index][1] for index in needed) <= sum(count for _, count in places) / (
        15 if "tile" in options else 4
    )
    with image.path.open("r+b") as stream:
        for index, (offset, count) in enumerate(places):
            if index not in needed:
                stream.seek(offset)
                stream.write(b"\xff" * count)
    after = source.batch(ZERO, ZERO, tile)
    assert torch.equal(before["images_BCHW"], after["images_BCHW"])
    if compression:
        with pytest.raises(DataError, match=r"a\.tif cannot be read as an image"):
            source.batch(ZERO, ZERO)


def test_bytes_read_for_a_tile_are_a_fraction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image = Image(write(tmp_path / "a.tif", random_pixels(1024, 1024), tile=(64, 64), compression="zlib"), 0)
    source, decoded = LargeImages([image], 1024, 1, None), []
    read = tifffile.FileHandle.read_segments

    def counting(*arguments: Any, **options: Any) -> Any:
        for some in read(*arguments, **options):
            decoded.append(sum(len(data) for data, _ in some))
            yield some

    monkeypatch.setattr(tifffile.FileHandle, "read_segments", counting)
    source.batch(ZERO, ZERO, ((1, 4), (3, 4)))
    assert 1024**2 / 16 <= sum(decoded) < 1.1 * 1024**2 / 16


def test_several_threads_read_at_once(tmp_path: Path) -> None:
    image = Image(write_as(tmp_path / "tiles-deflate.tif", random_pixels(300, 300, 3)), 0)
    source = LargeImages([image] * 4, 200, 3, 0)
    numbers = np.arange(4)
    expected = source.batch(numbers, numbers)["images_BCHW"]
    seen: list[Tensor] = []

    def read() -> None:
        seen.extend(source.batch(numbers, numbers)["images_BCHW"] for _ in range(5))

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 20
    assert all(torch.equal(each, expected) for each in seen)


def test_no_limit_on_the_size_of_a_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.png", random_pixels(50, 50))
    monkeypatch.setattr(images.pillow(), "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(images.pillow().DecompressionBombError):
        images.pillow().open(path)
    assert LargeImages([Image(path, 0)], 40, 3, None).batch(ZERO, ZERO)["images_BCHW"].shape == (1, 3, 40, 40)


@pytest.mark.parametrize("name", FORMATS)
def test_files_that_cannot_be_read(tmp_path: Path, name: str) -> None:
    path = write_as(tmp_path / name, random_pixels(100, 100))
    source = LargeImages([Image(path, 0)], 100, 1, None)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) - 2000], whole[:100], b"no image", b""):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=f"{name} cannot be read as an image: ."):
            source.batch(ZERO, ZERO)
    path.unlink()
    with pytest.raises(DataError, match=f"{name} cannot be read as an image: .*No such file"):
        source.batch(ZERO, ZERO)


@pytest.mark.parametrize("name", ["a.tif", "a.png"])
def test_images_that_do_not_fit(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    source = LargeImages([Image(path, 0)], 64, 3, 0)
    write(path, random_pixels(80, 63))
    with pytest.raises(DataError, match=rf"{name} has 80 x 63 pixels, but .* 64 x 64: set \[data\] image = 63 or less"):
        source.batch(ZERO, ZERO)
    write(path, random_pixels(80, 80).astype(np.uint16))
    with pytest.raises(DataError, match=f"{name} has samples of .*: save it with 8"):
        source.batch(ZERO, ZERO)


def test_kinds_of_tiff_that_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    source = LargeImages([Image(path, 0)], 8, 3, None)
    for pixels, kind in ((random_pixels(8, 8, 5), "minisblack"), (random_pixels(8, 8, 4), "separated")):
        tifffile.imwrite(path, pixels, photometric=kind, planarconfig="contig")
        with pytest.raises(DataError, match=r"a\.tif is neither grey nor RGB: save it as one of these"):
            source.batch(ZERO, ZERO)


def test_a_codec_that_is_missing(tmp_path: Path) -> None:
    if sys.modules.get("imagecodecs"):
        pytest.skip("none is missing")
    images.pillow().fromarray(random_pixels(8, 8, 3)).save(tmp_path / "a.tif", compression="tiff_lzw")
    with pytest.raises(DataError, match="is compressed as LZW: pip install imagecodecs, or save it with deflate"):
        LargeImages([Image(tmp_path / "a.tif", 0)], 8, 3, None).batch(ZERO, ZERO)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden: Any = None
    monkeypatch.setitem(sys.modules, "tifffile", hidden)
    with pytest.raises(DataError, match="to read and write TIFF: pip install tifffile"):
        large.tifffile()


def test_a_slide_is_the_same_however_it_is_cut() -> None:
    slide = Slide(seed=3, number=1, size=400, tumour=True)
    whole = slide.pixels(range(400), range(400))
    rows, columns = range(57, 311), range(123, 399)
    assert (slide.pixels(rows, columns) == whole[57:311, 123:399]).all()
    assert (slide.mask(rows, columns) == slide.mask(range(400), range(400))[57:311, 123:399]).all()
    assert (Slide(4, 1, 400, True).pixels(rows, columns) != whole[57:311, 123:399]).any()
    assert (Slide(3, 2, 400, True).pixels(rows, columns) != whole[57:311, 123:399]).any()


def test_tumours_have_more_and_darker_nuclei() -> None:
    """So much that a classifier has something to find, and yet there are benign nuclei beside them."""
    everything, middle = range(400), range(100, 300)
    for number in range(3):
        benign, tumour = (Slide(0, number, 400, grown) for grown in (False, True))
        counts = [np.bincount(slide.mask(everything, everything).ravel(), minlength=3) for slide in (benign, tumour)]
        assert counts[0][2] == 0
        assert counts[0][1] > 0
        assert min(counts[1]) > 0
        assert counts[1][2] > 2 * counts[0][1]
        bright = [slide.pixels(middle, middle).mean() for slide in (benign, tumour)]
        assert bright[1] < bright[0] - 5
    pixels, mask = tumour.pixels(everything, everything).astype(int), tumour.mask(everything, everything)
    colours = [pixels[mask == kind].mean(0) for kind in range(3)]
    assert colours[0].sum() > colours[1].sum() > colours[2].sum()
    assert all(colour[2] > colour[0] > colour[1] for colour in colours[1:])  # purple


def run(*arguments: object) -> tuple[int, str, str]:
    ended = CliRunner().invoke(data_app, ["pathology", *map(str, arguments)])
    return ended.exit_code, ended.stdout, ended.stderr


def files(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_the_command_writes_classes(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name in "ab":
        code, told, aside = run(tmp_path / name, "--count", 3, "--size", 300)
        assert code == 0, aside
        assert told.startswith(f"3 images of 300 x 300 pixels in {tmp_path / name}: ")
    assert sorted(files(tmp_path / "a")) == ["benign/00000.tif", "benign/00002.tif", "tumour/00001.tif"]
    assert files(tmp_path / "a") == files(tmp_path / "b")
    assert run(tmp_path / "c", "--count", 1, "--size", 300, "--seed", 1)[0] == 0
    assert files(tmp_path / "c")["benign/00000.tif"] != files(tmp_path / "a")["benign/00000.tif"]
    source = LargeImages(find_large_images(tmp_path / "a", find_classes(tmp_path / "a", 2)), 300, 3, None)
    given = source.batch(np.array([2]), ZERO)
    assert given["targets_B"].tolist() == [1]
    assert (unnormalised(given["images_BCHW"][0]) == Slide(0, 1, 300, True).pixels(range(300), range(300))).all()
    with tifffile.TiffFile(source.images[0].path) as file:
        assert file.pages.first.tile == (256, 256)
        assert file.pages.first.compression.name == "ADOBE_DEFLATE"


def test_the_command_writes_masks(tmp_path: Path) -> None:
    code, _, aside = run(tmp_path / "a", "--count", 2, "--size", 270, "--kind", "masks")
    assert code == 0, aside
    masks = find_masks(tmp_path / "a")
    assert [path.name for path in masks] == ["00000.tif", "00001.tif"]
    given = LargeImages([Image(path, 0) for path in masks], 270, 3, None, masks, 3).batch(np.array([1]), ZERO)
    assert (given["targets_BHW"][0].numpy() == Slide(0, 1, 270, True).mask(range(270), range(270))).all()


def test_the_command_does_not_write_among_other_things(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    code, told, aside = run(tmp_path, "--count", 1, "--size", 64)
    assert (code, told) == (1, "")
    assert "has something in it: name a folder that is new or empty" in aside
    assert files(tmp_path) == {"mine.txt": b"mine"}
    (tmp_path / "file").write_text("")
    code, _, aside = run(tmp_path / "file" / "a", "--count", 1, "--size", 64)
    assert code == 1
    assert "a cannot be written: Not a directory" in aside


COMMAND = "from echelon.train.data.command import data_app; data_app()"


def test_a_signal_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", COMMAND, "pathology", str(tmp_path / "a"), "--count", "1000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        try:
            while job.poll() is None and not [*tmp_path.rglob("*.tif")]:
                time.sleep(0.01)
            job.terminate()
            _, told = job.communicate(timeout=60)
        finally:
            job.kill()
    assert job.returncode == 143, told
    assert "Traceback" not in told
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("new", [True, False])
def test_a_failure_leaves_nothing(tmp_path: Path, new: bool) -> None:
    """In the second image, while it is written."""
    folder, told = tmp_path / "a" if new else tmp_path, []

    def full(more: int) -> None:
        told.append(more)
        if sum(told) > 300**2 * 4:
            raise OSError(28, "No space left on device")

    with pytest.raises(DataError, match="cannot be written: No space left on device"):
        write_set(folder, count=2, size=300, done=full)
    assert not [*tmp_path.iterdir()]


def test_progress_ends_where_it_was_said_to(tmp_path: Path) -> None:
    for kind in get_args(Kind):
        told: list[int] = []
        write_set(tmp_path / kind, count=2, size=300, kind=kind, done=told.append)
        assert sum(told) == painted_bytes(2, 300, kind)
