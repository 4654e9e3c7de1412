"""Forms of HTTP cut into their fields, and everything that is not a form."""

from __future__ import annotations

import pytest

from edge_runtime.doors.http.form import MAX_FIELDS, boundary_of, cut_form, read_form
from edge_runtime.errors import DecodeFailed

PART = b'--b\r\nContent-Disposition: form-data; name="picture"; filename="a.jpg"\r\nContent-Type: image/jpeg\r\n\r\n'


def part(data=b"x", name="picture"):
    return b'--b\r\nContent-Disposition: form-data; name="%s"\r\n\r\n%s\r\n' % (name.encode(), data)


def test_a_fields_data_is_every_byte_between_its_empty_line_and_the_boundary():
    data = b"\r\n--\r\n--c\r\n\x00\xff--b\r\n\r\n"
    (field,) = cut_form(PART + data + b"\r\n--b--\r\n", b"b")
    assert (field.name, field.file_name, bytes(field.data)) == ("picture", "a.jpg", data)


def test_a_form_that_came_as_a_view_is_cut_as_well():
    assert [bytes(each.data) for each in cut_form(memoryview(part(b"") + part(b"2") + b"--b--"), b"b")] == [b"", b"2"]


def test_other_fields_are_parameters_of_the_type_that_they_look_like():
    given = {"raw": b"true", "top_k": b"3", "timeout_ms": b"20.5", "word": b"nan", "id": b"7"}
    body = part() + b"".join(part(value, name) for name, value in given.items()) + b"--b--\r\n"
    pictures, fields = read_form(body, b"b")
    assert fields == {"id": "7", "parameters": {"raw": True, "top_k": 3, "timeout_ms": 20.5, "word": "nan"}}
    assert (len(pictures.rows), pictures.as_list) == (1, False)


@pytest.mark.parametrize(
    ("text", "boundary"),
    [
        ("multipart/form-data; boundary=----WebKitFormBoundaryAz09", b"----WebKitFormBoundaryAz09"),
        ('multipart/form-data; charset=utf-8; boundary="a b:c"', b"a b:c"),
        ("Multipart/Form-Data;Boundary=x", b"x"),
    ],
)
def test_a_boundary_is_read_as_clients_write_it(text, boundary):
    assert boundary_of(text) == boundary


@pytest.mark.parametrize(
    "text",
    [
        "multipart/form-data",
        "multipart/form-data; boundary=",
        'multipart/form-data; boundary=""',
        "multipart/form-data; boundary=" + "a" * 71,
        'multipart/form-data; boundary="a',
        "multipart/form-data; boundary=é",
        'multipart/form-data; boundary="a "',
        "multipart/form-data; " * 2000,
        'multipart/form-data; a="' * 2000,
    ],
)
def test_a_boundary_that_is_none_is_refused(text):
    with pytest.raises(DecodeFailed, match="boundary"):
        boundary_of(text)


NESTED = PART.replace(b"image/jpeg", b"multipart/mixed; boundary=c") + b"\r\n--b--"


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "does not begin"),
        (b"--", "does not begin"),
        (b"junk\r\n" + part() + b"--b--", "does not begin"),
        (b"--c\r\n", "does not begin"),
        (b"--b", "behind a boundary"),
        (b"--b-", "behind a boundary"),
        (b"--bc\r\n" + part(), "behind a boundary"),
        (b"--b--\r\n", "no field 'picture'"),
        (part(name="image") + b"--b--", "no field 'picture'"),
        (PART.replace(b'"picture"', b'"image"') + b"\r\n--b--", "a file in the field 'image'"),
        (part(), "last boundary is missing"),
        (PART + b"x" * 99, "last boundary is missing"),
        (PART + b"x\r\n--b", "behind a boundary"),
        (b"--b\r\n" + b"a: b\r\n" * 5000, "no end of its headers"),
        (b"--b\r\nContent-Disposition: form-data", "no end of its headers"),
        (b"--b\r\n\r\n\r\nx\r\n--b--", "wanted each once, name: value"),
        (b"--b\r\nA: b\r\n\r\nx\r\n--b--", "wanted the header Content-Disposition"),
        (b'--b\r\nContent-Disposition: attachment; name="picture"\r\n\r\nx\r\n--b--', "wanted the header"),
        (b"--b\r\nContent-Disposition: form-data\r\n\r\nx\r\n--b--", "wanted the header Content-Disposition"),
        (b'--b\r\nContent-Disposition: form-data; name="pic\r\n\r\nx\r\n--b--', "wanted the header"),
        (PART[:-2] + b"Content-Type: a/b\r\n\r\nx\r\n--b--", "each once"),
        (PART[:-2] + b"Content-Transfer-Encoding: base64\r\n\r\nx\r\n--b--", "Content-Transfer-Encoding 'base64'"),
        (NESTED, "is a form itself"),
        (part() + part(b"1", "raw") + part(b"1", "raw") + b"--b--", "'raw' twice"),
        (part() + part(b"1" * 2000, "raw") + b"--b--", "a parameter's value"),
        (part() * (MAX_FIELDS + 1) + b"--b--", f"more than {MAX_FIELDS} fields"),
    ],
)
def test_a_body_that_is_not_a_form_is_refused_with_its_fault(body, told):
    with pytest.raises(DecodeFailed, match=told):
        read_form(body, b"b")
