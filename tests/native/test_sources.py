"""A function's text is the key of its code: other files that the text reads are refused."""

import jax
import jax.numpy as jnp
import pytest

import normfuse
from normfuse.native import cache, compiler
from normfuse.native.compiler import CompileError, Source

READS = {
    '#include "my.h"': ['"my.h"'],
    '  # \t include "my.h" // mine': ['"my.h"'],
    '#\\\ninclude "my.h"': ['"my.h"'],
    '#inc\\  \nlude "my.h"': ['"my.h"'],
    '#inc??/\nlude "my.h"': ['"my.h"'],
    '%:include "my.h"': ['"my.h"'],
    '??=include "my.h"': ['"my.h"'],
    '/* a\n */ # /* b */ include "my.h"': ['"my.h"'],
    '#include_next "my.h"': ['"my.h"'],
    '#import "my.h"': ['"my.h"'],
    'auto a = "/*";\n#include "my.h"\nauto b = "*/";': ['"my.h"'],
    "int n = 1'000;\n#include \"my.h\"\nint m = 1'0;": ['"my.h"'],
    'char c = \'"\';\n#include "my.h"\n//"': ['"my.h"'],
    'auto s = R"/*(\n)/*";\n#include "my.h"\n//*/': ['"my.h"'],
    'auto s = u8R"(\n)" "/*";\n#include "my.h"\n//*/': ['"my.h"'],
    '// a comment\r\n#include "my.h"\r\n': ['"my.h"'],
    '#define MY "my.h"\n#include MY': ["MY"],
    '// #include "my.h"': [],
    '// goes on \\\n#include "my.h"': [],
    '/*\n#include "my.h"\n*/': ['"my.h"'],
    "int included = 1;": [],
    "#include <my.h>": ["<my.h>"],
    '#embed "numbers"': ['"numbers"'],
    '#if __has_include("my.h")\n#endif': ["__has_include"],
    'asm(".incbin \\"my.bin\\"");': [".incbin"],
    '#if 0\n#include "my.h"\n#endif': ['"my.h"'],
}


@pytest.mark.parametrize("text", READS, ids=repr)
def test_every_file_that_a_source_reads_is_found(text):
    assert list(compiler.files_read(text)) == READS[text]


# ---------------------------------------------------------------- element-wise functions

SCALED = "template <class T> T scaled(T x) { return FACTOR * x; }"


def test_a_function_of_an_edited_header_is_never_stale(tmp_path, monkeypatch):
    """In a process that finds the function of the header as it was."""
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_memory", {})
    header, values = tmp_path / "my.h", []
    for factor in (2, 3):
        header.write_text(f"#define FACTOR {factor}\n")
        cache._memory.clear()
        jax.clear_caches()
        with pytest.raises(ValueError, match=r'^elementwise: source reads ".*my.h", and a change'):
            normfuse.elementwise(f'#include "{header}"\n{SCALED}')(1.0)
        values.append(float(normfuse.elementwise(f"{header.read_text()}\n{SCALED}")(1.0)))
    assert values == [2, 3]


@pytest.mark.parametrize(
    "text",
    [text for text, found in READS.items() if found and "auto" not in text],
    ids=repr,
)
def test_a_source_that_is_not_whole_is_refused(text):
    with pytest.raises(ValueError, match="reads .*; put that file's text into the source"):
        normfuse.elementwise(f"{text}\ntemplate <class T> T f(T x) {{ return x; }}", name="f")


@pytest.mark.parametrize("header", ["cmath", "math.h", "stdint.h", "limits"])
def test_headers_of_the_compiler_may_be_included(header):
    source = f"#include <{header}>\ntemplate <class T> T f(T x) {{ return x + 1; }}"
    assert normfuse.elementwise(source)(jnp.float32(1)) == 2


# ---------------------------------------------------------------- kernels


def test_a_kernel_whose_header_is_not_in_its_key_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("cuda.bindings", reason="compiling needs cuda-bindings and NVRTC")
    monkeypatch.setenv("NORMFUSE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("my.cuh").write_text("#define FACTOR 2\n")
    text = '#include "my.cuh"\nextern "C" __global__ void a(float* x) { *x *= FACTOR; }'
    with pytest.raises(CompileError, match='a.cu reads "my.cuh", which is not among the source'):
        compiler.image_of(Source("a.cu", text), {}, "sm_90")
    whole = Source("a.cu", text, (("my.cuh", "#define FACTOR 3\n"),))
    assert compiler.image_of(whole, {}, "sm_90").data.startswith(b"\x7fELF")
    deep = Source("a.cu", text, (("my.cuh", '#include "other.cuh"\n'),))
    with pytest.raises(CompileError, match='my.cuh reads "other.cuh"'):
        compiler.image_of(deep, {}, "sm_90")
