"""The settings of `[enrolment]`, described below each field as in config/settings.py."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from edge_runtime.config.settings import Place, PositiveFloat


class EnrolmentSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The authority that enrolled this device (`edge-runtime enroll`): it renews the device's certificate in time."""

    url: Place
    """The authority's address."""

    identity: Place
    """The folder of `device.pem`, the device's certificate with its key, and `ca.crt`, whom it trusts."""

    renew_at: Annotated[float, Meta(gt=0, lt=1)] = 0.67
    """Share of the certificate's life after which it is renewed: with 90 days, 30 are left for tries."""

    retry_s: PositiveFloat = 3600.0
    """Time between two tries to renew, more or less a fifth. It doubles after each that fails, up to a day, and to a
    16th of what is left of the certificate."""
