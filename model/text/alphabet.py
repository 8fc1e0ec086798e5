"""The characters that byte-level BPE writes for bytes."""


def byte_alphabet() -> dict[str, int]:
    """Map the characters that byte-level BPE writes for bytes back to the bytes (GPT-2's table).

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
