"""Units of memory and data: KiB, MiB, GiB are powers of 1024; KB, MB, GB are powers of 1000."""

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12
