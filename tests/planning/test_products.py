"""Products that a user has timed: rates that are known come out, and what is no product is refused."""

from importlib.resources import files

import pytest

from overlap import UsageError
from overlap.cli import main
from overlap.planning.device import Device
from overlap.planning.products import fit, machine_file, read
from topology import cluster

SIZES = [(512, 512, 512), (1024, 2048, 512), (4096, 4096, 4096), (8192, 1024, 2048), (2048, 2048, 2048)]


def write(path, rows, header="m,n,k,dtype,us"):
    path.write_text("\n".join(["# of a chip", header, *rows]) + "\n")
    return str(path)


def test_the_rate_that_products_were_made_with_is_found_and_written(tmp_path, capsys):
    rows = [f"{m},{n},{k},bfloat16,{(3e-6 + 2 * m * n * k / 5e14) * 1e6!r}" for m, n, k in SIZES]
    path, out = write(tmp_path / "gemms.csv", rows), tmp_path / "ours.toml"
    found = fit(read(path), path)["bf16"]
    assert found.rate.flops_per_s == pytest.approx(5e14)
    assert found.rate.start_s == pytest.approx(3e-6)
    assert found.worst == pytest.approx(0, abs=1e-9)
    assert main(["calibrate", "--products", path, "--cluster", "p5.48xlarge", "-o", str(out)]) == 0
    assert capsys.readouterr().out.startswith("bf16: 500 TFLOP/s after 3 us; 5 products")
    device = Device.of(cluster(str(out)))
    ours = cluster("p5.48xlarge").machine.chip
    assert device.products["bf16"].flops_per_s == pytest.approx(5e14 * ours.sustained.value)
    assert set(device.products) == {"bf16", "fp8"}  # the other one stays


def test_the_figures_of_an_h100_are_those_of_its_published_products():
    path = str(files("overlap.planning") / "published" / "h100-bf16.csv")
    found = fit(read(path), path)["bf16"]
    (of,) = [each for each in cluster("p5.48xlarge").machine.chip.products if each.kind == "bf16"]
    assert found.rate.flops_per_s == pytest.approx(of.flops_per_s.value, rel=1e-3)
    assert found.rate.start_s == pytest.approx(of.start_s.value, rel=1e-2)
    assert found.typical < 0.07
    assert 'extends = "p5.48xlarge"' in machine_file("p5.48xlarge", "ours", path, {"bf16": found})


@pytest.mark.parametrize(
    ("header", "rows", "expected"),
    [
        ("m,n,dtype,us", ["1,1,bf16,1"], "expected columns m, n, k, dtype and tflops, us, ms or s, found no k"),
        ("m,n,k,dtype", ["1,1,1,bf16"], "expected one column of tflops, us, ms or s, found none"),
        ("m,n,k,dtype,us", ["1,1,-1,bf16,1"], ":3: k: expected a positive number, found '-1'"),
        ("m,n,k,dtype,us", ["1,1,1,bf16,nan"], ":3: us: expected a positive number, found 'nan'"),
        ("m,n,k,dtype,us", ["1,1,1,bf16,1"] * 3, "bf16: expected 4 products or more, found 3"),
    ],
)
def test_what_is_no_product_is_refused(tmp_path, header, rows, expected):
    path = write(tmp_path / "bad.csv", rows, header)
    with pytest.raises(UsageError) as refused:
        fit(read(path), path)
    assert str(refused.value).startswith(path)
    assert expected in str(refused.value)


@pytest.mark.parametrize(
    "words",
    [
        ["--cluster", "p9.48xlarge"],
        [],
        ["--cluster", "p5.48xlarge", "log.txt"],
        ["--cluster", "p5.48xlarge", "--op", "all_reduce"],
        ["--cluster", "p5.48xlarge", "--ranks", "2"],
    ],
)
def test_products_are_of_one_of_our_machines_and_stand_alone(tmp_path, capsys, words):
    (path := tmp_path / "products.csv").write_text("m,n,k,dtype,ms\n")
    assert main(["calibrate", "--products", str(path), *words, "-o", str(tmp_path / "out.toml")]) == 2
    told = "--products: expected one of our machines as --cluster, and no LOG beside it; got "
    assert told in capsys.readouterr().err
