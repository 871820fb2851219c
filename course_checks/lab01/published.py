"""Published numbers that the checks of lab 1 hold a learner's functions against."""

from __future__ import annotations

# Parameters as num_parameters() of each checkpoint counts them, the figure of which its page on the Hugging Face hub shows
# the first digits. layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, tied: from the config.json there.
PARAMETERS: dict[str, tuple[tuple[int, int, int, int, int, int, int, bool], int]] = {
    "Llama-2-7B": ((32, 4096, 32, 32, 128, 11008, 32000, False), 6_738_415_616),
    "Llama-2-13B": ((40, 5120, 40, 40, 128, 13824, 32000, False), 13_015_864_320),
    "Llama-3.1-8B": ((32, 4096, 32, 8, 128, 14336, 128256, False), 8_030_261_248),
    "Llama-3.1-70B": ((80, 8192, 64, 8, 128, 28672, 128256, False), 70_553_706_496),
    "Llama-3.2-1B": ((16, 2048, 32, 8, 64, 8192, 128256, True), 1_235_814_400),
    "SmolLM2-135M": ((30, 576, 9, 3, 64, 1536, 49152, True), 134_515_008),
    # heads x head_dim is 4,096 here, and hidden 5,120
    "Mistral-Nemo-12B": ((40, 5120, 32, 8, 128, 14336, 131072, False), 12_247_782_400),
}

# ZeRO, arXiv:1910.02054, table 1: GB of model states a GPU with mixed-precision Adam, by (billions of parameters, ranks),
# for P_os, P_os+g and P_os+g+p: stages 1, 2 and 3. Printed digits as they stand there; the columns of 128B and 1T are cut
# off, not rounded.
ZERO_TABLE_1: dict[tuple[float, int], tuple[str, str, str]] = {
    (7.5, 1): ("120", "120", "120"),
    (7.5, 4): ("52.5", "41.3", "30"),
    (7.5, 16): ("35.6", "21.6", "7.5"),
    (7.5, 64): ("31.4", "16.6", "1.88"),
    (7.5, 256): ("30.4", "15.4", "0.47"),
    (7.5, 1024): ("30.1", "15.1", "0.12"),
    (128, 1): ("2048", "2048", "2048"),
    (128, 4): ("896", "704", "512"),
    (128, 16): ("608", "368", "128"),
    (128, 64): ("536", "284", "32"),
    (128, 256): ("518", "263", "8"),
    (128, 1024): ("513", "257", "2"),
    (1000, 1): ("16000", "16000", "16000"),
    (1000, 4): ("7000", "5500", "4000"),
    (1000, 16): ("4750", "2875", "1000"),
    (1000, 64): ("4187", "2218", "250"),
    (1000, 256): ("4046", "2054", "62.5"),
    (1000, 1024): ("4011", "2013", "15.6"),
}


def last_digit(printed: str) -> float:
    """What one step of the last printed digit is worth: '52.5' -> 0.1."""
    return 10.0 ** -len(printed.partition(".")[2])
