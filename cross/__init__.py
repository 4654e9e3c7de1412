"""Images for devices, built on x86 for amd64 and arm64 without a container daemon and without root; see README.md.

`build_image` puts one together: `debian` and `wheels` give files, `tree` holds them, `bytecode` compiles them, `sbom`
lists them, `oci` writes them. `lock_debian` chooses versions of Debian's packages.
"""
