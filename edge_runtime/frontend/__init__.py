"""Decode, call, encode: where messages meet servables. One codec, one admission, one set of error codes for all transports."""
