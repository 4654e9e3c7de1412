"""Where messages meet servables: one admission and one set of error codes for every transport."""
