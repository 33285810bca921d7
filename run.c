/* run.c: inference of Llama-family language models on a CPU, in one file.

   A language model reads a list of tokens (numbered pieces of text) and gives every entry of its vocabulary a
   score, the logit, for being the next one. Drawing from these scores, appending the draw and asking again writes text.
   This file does that: it opens a checkpoint, turns a prompt into tokens, runs the transformer, samples, prints.

       ./run models/stories.flat.gguf -i "Once upon a time"

   It needs libc, libm and, for several threads, OpenMP. `./run -h` lists the options.

   MAP. The sections stand bottom-up: each calls only those above it. Beside each are its lines, and whether a first
   reader must, may or need not read it.

       PART I: the engine
       §1   basics           166  may       errors, memory, growing texts
       §2   number formats   217  must      how weights lie in memory; how activations become int8 and bf16
       §3   model            276  must      Config, Matrix, Layer, Model; the tables of tensors and architectures
       §4   kernels          500  may       the matrix product: one shape of loop for all types and processors
       §5   layers           134  must      rmsnorm, softmax, rope, swiglu: the small functions of the papers
       §6   session          329  may       what changes while running: key/value cache, activations, threads
       §7   forward          227  must      rows in, logits out: the transformer
       §8   words            203  need not  characters, and the patterns that cut a text before BPE
       §9   tokenizer        401  may       text to token ids and back
       §10  sampler          222  must      logits to the next token
       §11  sequences        360  must      the loop: many texts, each a token further; drafts, scores, sliding

       PART II: files
       §12  packing          495  may       the bytes of files, their number formats; rows become panels
       §13  GGUF             438  need not  the files of the llama.cpp world, and flat ones
       §14  llama2.c         158  need not  its files; which format a file has
       §15  vocabularies     208  need not  the tokenizers of both kinds of file

       PART III: people
       §16  options          165  need not  one table of what a user can ask for
       §17  threads           79  need not  how many processors there are; memory
       §18  chat templates   199  may       roles to ids
       §19  terminal         261  need not  a line to type into
       §20  JSON             182  need not  read and written
       §21  generation       326  may       options and prompt in, text or JSON out
       §22  inspection       187  need not  tokenize, info, perplexity
       §23  chat             334  may       a conversation, its commands and its file
       §24  requests         110  need not  JSON Lines in
       §25  batch            325  may       thousands of prompts, some at a time
       §26  bench            234  need not  speed, beside the limits of the machine
       §27  command line     119  need not  arguments to options to a mode

   In a hurry? Read §3 (what a model is), §7 (what it computes) and §11 (the loop around it).

   LEGEND. The same names stand in the code, the tests and the documents:

       dim         width of the residual stream           n_heads     query heads
       hidden_dim  width inside the feed-forward          n_kv_heads  key/value heads, each for a group of query heads
       head_dim    width of one head                      n_ctx       positions that the cache of a sequence can hold
       q_dim       n_heads * head_dim                     kv_dim      n_kv_heads * head_dim
       loops: r row, l layer, h head, p panel, k column of a weight matrix, t position in a sequence, i element

   THE PROMISE. A logit does not depend on how it was computed: not on the number of threads, on how a prompt is cut
   into chunks, on what else is in the batch, or on the instruction set. Every sum has one fixed order, every
   multiply-add is fused exactly where it is written so, and the tests compare with ==. doc/numerics.md explains, and
   names the exceptions.

   REFERENCES. Vaswani et al. 2017, Attention is all you need. Zhang & Sennrich 2019, Root mean square layer
   normalization. Su et al. 2021, RoFormer (RoPE). Shazeer 2020, GLU variants improve transformer (SwiGLU). Ainslie et
   al. 2023, GQA. Touvron et al. 2023, Llama 2. Milakov & Gimelshein 2018, Online normalizer calculation for softmax.
   Holtzman et al. 2020, The curious case of neural text degeneration (top-p). Kudo & Richardson 2018, SentencePiece.
   Radford et al. 2019, GPT-2 (byte-level BPE). Chen et al. 2023, Position interpolation. Peng et al. 2023, YaRN. */

#define _GNU_SOURCE // sched_getaffinity, MAP_ANONYMOUS, memmem

#include <assert.h>
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <stdnoreturn.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
static int omp_get_num_threads(void) { return 1; }
#endif

#define RUN_VERSION "0.1"

// ---------------------------------------------------------------------------------------------------------------------
// §1 Basics
//
// Errors, memory, texts. Two rules hold everywhere: a failure is one line on stderr that names the file or option, what
// was expected and what was found, and ends the process (1: bad data or failure, 2: bad usage); and a number that comes
// from a file or the user is checked before it sizes or indexes anything. An assert is for our own mistakes only.

// How the n bytes at text begin: with a complete character (returns its length), with a part of one that more bytes
// could complete (returns 0), or with neither (returns -1). Ref: Unicode 15, table 3-7.
static int utf8_scan(const char *text, size_t n) {
    const uint8_t *b = (const uint8_t *)text;
    int len = b[0] < 0x80 ? 1 : b[0] < 0xC2 ? 0 : b[0] < 0xE0 ? 2 : b[0] < 0xF0 ? 3 : b[0] < 0xF5 ? 4 : 0;
    if (len == 0) return -1; // a byte that cannot begin one
    if (n > 1 && len > 1) {  // the second byte's range excludes overlong forms, surrogates and what lies past U+10FFFF
        uint8_t low = b[0] == 0xE0 ? 0xA0 : b[0] == 0xF0 ? 0x90 : 0x80;
        uint8_t high = b[0] == 0xED ? 0x9F : b[0] == 0xF4 ? 0x8F : 0xBF;
        if (b[1] < low || b[1] > high) return -1;
    }
    for (int i = 2; i < len && (size_t)i < n; i++)
        if ((b[i] & 0xC0) != 0x80) return -1;
    return (size_t)len <= n ? len : 0;
}

// The code point of a complete character.
static uint32_t utf8_decode(const char *text, int len) {
    static const uint8_t lead_bits[] = {0, 0x7f, 0x1f, 0x0f, 0x07};
    uint32_t c = (uint8_t)text[0] & lead_bits[len];
    for (int i = 1; i < len; i++) c = c << 6 | ((uint8_t)text[i] & 0x3f);
    return c;
}

// A failure is one line, whatever is in the names that it quotes: no control characters, no broken UTF-8.
static void print_escaped(FILE *out, const char *text) {
    for (size_t n = strlen(text), len; n > 0; text += len, n -= len) {
        int scanned = utf8_scan(text, n);
        len = scanned > 0 ? (size_t)scanned : 1;
        if (scanned <= 0 || (uint8_t)*text < 0x20 || *text == 0x7f) fprintf(out, "\\x%02x", (uint8_t)*text);
        else fwrite(text, 1, len, out);
    }
}

static noreturn void vdie(int status, const char *format, va_list args) {
    char message[2048];
    vsnprintf(message, sizeof message, format, args);
    fflush(stdout);
    fputs("run: ", stderr);
    print_escaped(stderr, message);
    fputc('\n', stderr);
    _exit(status); // at once: other threads may be at work, and nothing is left to tidy up
}

// Bad data or a failed operation: message, exit 1.
__attribute__((format(printf, 1, 2))) static noreturn void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vdie(1, format, args);
}

// A command line that makes no sense: message, exit 2.
__attribute__((format(printf, 1, 2))) static noreturn void die_usage(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vdie(2, format, args);
}

static int min_int(int a, int b) { return a < b ? a : b; }

static int max_int(int a, int b) { return a > b ? a : b; }

// n rounded up to a multiple of m.
static size_t pad(size_t n, size_t m) { return (n + m - 1) / m * m; }

// a * b, or death where the product leaves size_t; `what` names what is being sized.
static size_t product(size_t a, size_t b, const char *what) {
    size_t c;
    if (__builtin_mul_overflow(a, b, &c)) die("%s: %zu * %zu bytes are more than this machine can address", what, a, b);
    return c;
}

// Zeroed memory for n elements. It starts on a 64-byte boundary, a cache line and the widest vector. (The + 1 here and
// below: zero elements, too, have an address.)
static void *alloc(size_t n, size_t element_size, const char *what) {
    size_t bytes = pad(product(n, element_size, what) + 1, 64);
    void *memory = NULL;
    if (posix_memalign(&memory, 64, bytes)) die("out of memory: %s needs %zu bytes", what, bytes);
    return memset(memory, 0, bytes);
}

// Zeroed memory straight from the operating system, which commits a page only when it is first touched: what is
// reserved and never used costs nothing. For weights and the key/value cache.
static void *alloc_pages(size_t n, size_t element_size, const char *what) {
    size_t bytes = product(n, element_size, what);
    void *memory = mmap(NULL, bytes + 1, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) die("out of memory: %s needs %zu bytes", what, bytes);
    return memory;
}

static void free_pages(void *memory, size_t n, size_t element_size) {
    if (memory) munmap(memory, n * element_size + 1);
}

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

// On a terminal, where something takes more than a second: how far it is. The line goes when all is done.
static void show_progress(const char *what, int done, int n, double start) {
    if (seconds() - start < 1 || !isatty(STDERR_FILENO)) return;
    if (done < n) fprintf(stderr, "\r%s: %d of %d", what, done, n);
    else fprintf(stderr, "\r\033[K");
    fflush(stderr);
}

// A growing array with room for at least n elements: as it is where its `cap` is enough, else moved to a larger place.
static void *reserve(void *array, size_t n, size_t *cap, size_t element_size, const char *what) {
    if (n <= *cap) return array;
    *cap = pad(n, 32) * 2;
    void *grown = realloc(array, product(*cap, element_size, what));
    if (!grown) die("out of memory: %s of %zu elements", what, n);
    return grown;
}

// A growing run of bytes: a prompt, a piece of output. May hold zero bytes.
typedef struct {
    char *data;
    size_t len, cap;
} Text;

static void text_append(Text *t, const void *bytes, size_t n) {
    t->data = reserve(t->data, t->len + n, &t->cap, 1, "a text");
    if (n) memcpy(t->data + t->len, bytes, n);
    t->len += n;
}

static void text_string(Text *t, const char *string) { text_append(t, string, strlen(string)); }

__attribute__((format(printf, 2, 3))) static void text_format(Text *t, const char *format, ...) {
    va_list args;
    char piece[512];
    va_start(args, format);
    int n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    assert(n >= 0 && n < (int)sizeof piece);
    text_append(t, piece, (size_t)n);
}

// A stretch of text that lies elsewhere.
typedef struct {
    const char *text; // not terminated
    size_t len;
} String;

static bool string_is(String s, const char *text) { return s.len == strlen(text) && !memcmp(s.text, text, s.len); }

// How much of a string a message shows, for %.*s.
static int shown(String s) { return s.len < 80 ? (int)s.len : 80; }

// A file as read-only memory (§12).
typedef struct {
    const char *path;
    const uint8_t *data;
    size_t size;
} Mapping;

// ---------------------------------------------------------------------------------------------------------------------
// §2 Number formats
//
// How numbers lie in memory. A checkpoint stores a weight matrix row by row. The kernels of §4 want to multiply one
// activation with many weights at once, so that the lanes of a vector register are different *outputs*: then nothing is
// ever added across lanes, and each output adds its products in the order of the columns, whatever the vector width. So
// every matrix is rearranged, while loading or on export, 16 rows at a time, into
//
//   THE PANEL                     row 0     row 1     row 2           row 15
//                 step 0       [ 4 bytes | 4 bytes | 4 bytes | ... | 4 bytes ]     <- one 64-byte cache line
//                 step 1       [ 4 bytes | 4 bytes | 4 bytes | ... | 4 bytes ]
//                 ...
//                 last step    [ 4 bytes | 4 bytes | 4 bytes | ... | 4 bytes ]
//
// A 4-byte step of a row holds as many columns as fit: 1 float, 2 halves (f16 or bf16, the lower column in the lower
// half), 4 int8. Panel follows panel; the last one is padded with rows of zeros.
//
// PLANES. Weights of fewer than 8 bits come in blocks of 32 columns, which are 8 words of 4 columns. A plane of b bits
// takes b steps for a block. Its step i holds b bits of each column of words 8 / b * i and following: those of the
// first word in the low b bits of each byte, those of the next above them. A weight of 4 bits is one plane; one of 5
// bits a plane of 4 and, after it in each block, one with the bit above them; 6 is 4 + 2, 3 is 2 + 1. So whatever the
// width, a block of a panel takes just as many cache lines as a weight has bits:
//
//     int4, step 0, byte j:   [ column j + 4 | column j ]           step 1:  [ column j + 12 | column j + 8 ] ...
//
// QUANTISATION. A group of neighbouring weights shares a scale and perhaps a minimum, and keeps a small integer each:
//
//     w = scale * (q - zero) + minimum
//
// int8: q in -128..127, zero 0. Below 8 bits q has no sign, and zero is 0 or a power of two; or q is the index of one
// of 16 values. The products q_w * q_x of two groups are summed exactly, in integers; only the sum meets the scales.
// Activations are quantised on the fly in blocks of 32 (quantize_block).
//
// SCALES lie beside the panels as small as the file has them (nothing is lost): a float or f16 for each group, or a
// power of two in a byte; or, in two stages, a small integer for each group and an f16 factor for each 256 columns:
//
//     scale = factor * integer            minimum = second factor * second integer
//
// So for each panel and each superblock (256 columns, or a group where there is one stage) there are 16 factors, 16
// factors of the minima, and for each group in it 16 integers and 16 integers of the minima, as far as there are any.

typedef enum { F32, F16, BF16, I8, I4, I5, I6, I3, I2, IQ4, FP4, I8_16, U8, U8_16, N_TYPES } Type;

// What the 16 codes of a 4-bit type stand for. IQ4: denser around zero, as trained weights are. FP4: twice the numbers
// of 1 bit of sign, 2 of exponent and 1 of mantissa; the scales take the two back. Ref: OCP Microscaling Formats 1.0.
static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

static const struct {
    const char *name;
    int low, high;        // bits of the plane, and of the one above it
    int sum;              // columns that are summed as integers, before they meet a scale; 0: none
    const int8_t *values; // or NULL, where a code is the number itself
} types[N_TYPES] = {
    {"f32", 32, 0, 0, NULL},       {"f16", 16, 0, 0, NULL},
    {"bf16", 16, 0, 0, NULL},      {"int8", 8, 0, 32, NULL},
    {"int4", 4, 0, 32, NULL},      {"int5", 4, 1, 32, NULL},
    {"int6", 4, 2, 16, NULL},      {"int3", 2, 1, 16, NULL},
    {"int2", 2, 0, 16, NULL},      {"iq4", 4, 0, 32, iq4_values},
    {"fp4", 4, 0, 32, fp4_values}, {"int8", 8, 0, 16, NULL}, // with groups that are no multiple of 32
    {"uint8", 8, 0, 32, NULL}, // the last two are what planes become for the kernels (§4): 0..63
    {"uint8", 8, 0, 16, NULL},
};

typedef enum { SCALE_F32, SCALE_F16, SCALE_POWER, SCALE_PRODUCT, SCALE_NIBBLES, N_SCALINGS } Scaling;

static const struct {
    const char *name;
    int factor_bytes;                                // of a factor: one for each superblock, or none
    int code_bytes;                                  // of an integer: one for each group, or none
    int superblock;                                  // its columns; 0: those of a group
} scalings[N_SCALINGS] = {{"f32", 4, 0, 0},          // the factor is the scale
                          {"f16", 2, 0, 0},          // the same
                          {"power of two", 0, 1, 0}, // 2^(code - 128)
                          {"int8 * f16", 2, 1, 256},
                          {"int4 * f16", 2, 1, 256}}; // scale in the low, minimum in the high 4 bits of one byte

static const char *type_name(Type type) { return types[type].name; }
static int type_bits(Type type) { return types[type].low + types[type].high; }
static bool is_quantized(Type type) { return type >= I8; }
static bool is_int8(Type type) { return type == I8 || type == I8_16; }

// A word with the low b bits of each byte on.
static inline uint32_t low_bits(int b) { return 0x01010101u * ((1u << b) - 1); }

// Columns in a 4-byte step, of types that are one plane.
static int step_columns(Type type) { return 32 / types[type].low; }

enum {
    PANEL = 16, // rows in a panel
    BLOCK = 32, // columns that share a scale in a row of quantised activations
    STRIP = 6,  // rows of quantised activations that lie together
};

static float float_from_bits(uint32_t bits) {
    float f;
    memcpy(&f, &bits, sizeof f);
    return f;
}

static uint32_t bits_of_float(float f) {
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    return bits;
}

// IEEE half precision: 1 bit of sign, 5 of exponent (bias 15), 10 of mantissa. Exact.
static float float_from_f16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, magnitude = (uint32_t)(half & 0x7fff) << 13;
    if ((half & 0x7c00) == 0x7c00) return float_from_bits(sign | 0x7f800000 | magnitude); // infinity or NaN
    // The exponent is now too small by 127 - 15: multiply by 2^112. Subnormal halves become normal floats.
    return float_from_bits(sign | bits_of_float(float_from_bits(magnitude) * 0x1p112f));
}

// Rounds to the nearest half, ties to even; beyond the largest, to infinity.
static uint16_t f16_from_float(float f) {
    uint32_t bits = bits_of_float(f), magnitude = bits & 0x7fffffff;
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
    if (magnitude > 0x7f800000) return sign | 0x7e00;  // NaN
    if (magnitude >= 0x47800000) return sign | 0x7c00; // 65536 and beyond
    if (magnitude < 0x38800000)                        // below 2^-14: 0.5 has an ulp of 2^-24, that of subnormal halves
        return (uint16_t)(sign | (bits_of_float(float_from_bits(magnitude) + 0.5f) - bits_of_float(0.5f)));
    magnitude += 0xfff + (magnitude >> 13 & 1);
    return (uint16_t)(sign | (magnitude - 0x38000000) >> 13);
}

// bfloat16 is the upper half of a float.
static float float_from_bf16(uint16_t half) { return float_from_bits((uint32_t)half << 16); }

// Rounds to the nearest bfloat16, ties to even.
static uint16_t bf16_from_float(float f) {
    uint32_t bits = bits_of_float(f);
    return (uint16_t)(f != f ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16); // NaN remains NaN
}

static inline uint16_t load_u16(const uint8_t *p) { return (uint16_t)(p[0] | p[1] << 8); }
static inline uint32_t load_u32(const void *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

// --- activations

// Rows of activations, ready to be multiplied: as floats; rounded to bf16 where the model has such matrices; and as
// int8 where it has quantised ones. The kernels meet 6 rows at a time, so the int8 lie in strips of 6 rows: what they
// need together lies together. (A row that is alone is a strip of 1, and stays in the fastest cache.)
typedef struct {
    size_t stride;   // elements from one row to the next, a multiple of BLOCK
    int strip;       // rows in a strip, STRIP or 1
    float *f;        // [n_rows, stride]
    uint32_t *pairs; // [n_rows, stride / 2]   words of 2 bf16, the lower column in the lower half
    int32_t *q;      // [strips][stride / 4][strip] words of 4 int8          f is about scale * q
    float *scale;    // [strips][stride / BLOCK][strip]
    float *sum;      // [strips][stride / BLOCK][N_SUMS][strip]      scale * (sum of q)
    int32_t *minus;  // [strips][stride / BLOCK][N_SUMS][strip]      -(sum of q)
} Activations;

// Over all columns of a block, its first 16, its last 16.
enum { SUM_ALL, SUM_FIRST, SUM_LAST, N_SUMS };

// Where row `row` has its entry for column k in an array with an entry for each `columns` columns.
static inline size_t strip_index(size_t stride, size_t strip, size_t row, size_t k, size_t columns) {
    return (row / strip * (stride / columns) + k / columns) * strip + row % strip;
}

// And where it has the first of its sums for the block of column k.
static inline size_t strip_sums(size_t stride, size_t strip, size_t row, size_t k) {
    return strip_index(stride, strip, row - row % strip, k, BLOCK) * N_SUMS + row % strip;
}

// Quantise 32 floats: scale = max|f| / 127 and q = round(f / scale), ties to even. An all-zero block has scale 0 and
// zeros, not 0/0. A block with a NaN or an infinity gets the scale NaN, so that the error reaches the logits and is
// reported there. What is written lies `strip` entries apart.
static void quantize_block(const float *f, size_t strip, int32_t *words, float *scale, int32_t *minus, float *sum) {
    uint32_t bits = 0; // without their sign, floats compare like the integers with the same bits, NaN highest
    for (int i = 0; i < BLOCK; i++) {
        uint32_t magnitude = bits_of_float(f[i]) & 0x7fffffff;
        bits = magnitude > bits ? magnitude : bits;
    }
    float largest = float_from_bits(bits), inverse = 127.0f / largest;
    bool usable = isfinite(largest) && isfinite(inverse); // else zero, too small to divide by, or not a number
    int32_t q[BLOCK] = {0}, first = 0, last = 0;
    // Adding and subtracting 1.5 * 2^23 leaves no room for a fraction: the addition rounds, to even.
    if (usable)
        for (int i = 0; i < BLOCK; i++) q[i] = (int32_t)((f[i] * inverse + 12582912.0f) - 12582912.0f);
    for (int i = 0; i < 16; i++) first += q[i];
    for (int i = 16; i < BLOCK; i++) last += q[i];
    int8_t bytes[BLOCK];
    for (int i = 0; i < BLOCK; i++) bytes[i] = (int8_t)q[i];
    for (size_t i = 0; i < BLOCK / 4; i++) memcpy(words + i * strip, bytes + 4 * i, 4);
    const int32_t sums[N_SUMS] = {first + last, first, last};
    *scale = usable ? largest / 127.0f : isfinite(largest) ? 0 : NAN;
    for (size_t i = 0; i < N_SUMS; i++) {
        minus[i * strip] = -sums[i];
        sum[i * strip] = *scale * (float)sums[i];
    }
}

// Make a row of floats ready: fill up its last block, and convert it to what this model's matrices are multiplied with.
static void prepare_row(const Activations *x, int row, int cols) {
    float *f = x->f + (size_t)row * x->stride;
    size_t end = pad((size_t)cols, BLOCK), strip = (size_t)x->strip, r = (size_t)row;
    for (size_t i = (size_t)cols; i < end; i++) f[i] = 0;
    if (x->pairs) {
        uint32_t *pairs = x->pairs + (size_t)row * x->stride / 2;
        for (size_t i = 0; i < end / 2; i++)
            pairs[i] = bf16_from_float(f[2 * i]) | (uint32_t)bf16_from_float(f[2 * i + 1]) << 16;
    }
    if (!x->q) return;
    for (size_t k = 0; k < end; k += BLOCK) {
        size_t at = strip_index(x->stride, strip, r, k, BLOCK), sums = strip_sums(x->stride, strip, r, k);
        int32_t *words = x->q + strip_index(x->stride, strip, r, k, 4);
        quantize_block(f + k, strip, words, x->scale + at, x->minus + sums, x->sum + sums);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §3 Model
//
// What a model is: a Config of hyperparameters, and for every layer four matrices for attention, three for the
// feed-forward and two norms. A Model never changes once it is loaded; everything that does is in the Session (§6).
// Part II turns files into Models; nothing that Part I computes depends on the kind of file.

// W: [rows, cols], as panels. y = W x is what every matrix does.
typedef struct {
    Type type;
    int rows, cols;
    const void *panels; // [ceil(rows / 16)][cols * bits / 32][16 rows] of 4-byte steps
    const void *scales; // [ceil(rows / 16)][cols / superblock] superblocks, where it is quantised (§2); and then
    Scaling scaling;    // how they lie in it
    int group;          // columns that share a scale, a multiple of 16
    int zero;           // what is subtracted from each q
    bool has_min;
} Matrix;

typedef enum { ROPE_UNSCALED, ROPE_LINEAR, ROPE_YARN, ROPE_NTK } RopeScaling; // files have all but the last

typedef struct {
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, head_dim, vocab_size;
    int n_ctx_train;    // positions the model was trained for, or stretched to
    int sliding_window; // a row sees this many positions, itself included; 0: all
    float norm_eps;
    double rope_base;
    RopeScaling rope_scaling;
    double rope_factor; // by which the context was stretched
    int rope_n_ctx;     // context before stretching
} Config;

typedef struct {
    const float *attn_norm, *ffn_norm;              // [dim]
    Matrix q, k, v, o;                              // [q_dim, dim], [kv_dim, dim], [kv_dim, dim], [dim, q_dim]
    const float *q_bias, *k_bias, *v_bias, *o_bias; // [q_dim], [kv_dim], [kv_dim], [dim], or NULL
    const float *q_norm, *k_norm;                   // [head_dim], or NULL: rmsnorm of each head before RoPE
    Matrix gate, down, up;                          // [hidden_dim, dim], [dim, hidden_dim], [hidden_dim, dim]
} Layer;

typedef struct {
    Config config;
    const char *path;
    char format[80], name[88];  // what kind of file it is; what the file calls itself
    Matrix embed, output;       // [vocab_size, dim] both; the same panels where they are tied
    Layer *layers;              // [n_layers]
    const float *final_norm;    // [dim]
    double *rope_freqs;         // [head_dim / 2], radians per position
    const float *rope_divisors; // [head_dim / 2] or NULL: what the file divides them by
    float rope_magnitude;       // YaRN lengthens queries and keys a little
    bool tied;                  // output is embed
    bool any_quantized;         // some matrix wants quantised activations
    bool any_bf16;              // some matrix wants them as bf16
    bool counts_prompt;         // llama2.c: -n counts the prompt's tokens too
    int n_threads;              // for loading
    Mapping file;               // flat checkpoints: the matrices lie in it; else empty
} Model;

static int q_dim(const Config *c) { return c->n_heads * c->head_dim; }
static int kv_dim(const Config *c) { return c->n_kv_heads * c->head_dim; }

// --- the tables: which tensors a model may have, and which architectures there are

typedef enum { VECTOR, VOCAB, DIM, HIDDEN, Q_DIM, KV_DIM, HEAD, HALF_HEAD } Dim;

enum {
    OPTIONAL = 1, // a model may lack it
    TURNS = 2     // RoPE turns its rows, or what it is added to or multiplied with
};

typedef struct {
    const char *name;  // in a GGUF file; in a layer, after "blk.N."
    const char *field; // of Model or Layer, and
    size_t at;         // where in it: a Matrix, or a pointer to the floats of a vector
    bool in_layer;
    Dim rows, cols; // rows: VECTOR where it is one
    int flags;
} Tensor;

#define IN_MODEL(field) #field, offsetof(Model, field), false
#define IN_LAYER(field) #field, offsetof(Layer, field), true
static const Tensor tensors[] = {
    {"token_embd.weight", IN_MODEL(embed), VOCAB, DIM, 0},
    {"attn_norm.weight", IN_LAYER(attn_norm), VECTOR, DIM, 0},
    {"attn_q.weight", IN_LAYER(q), Q_DIM, DIM, TURNS},
    {"attn_k.weight", IN_LAYER(k), KV_DIM, DIM, TURNS},
    {"attn_v.weight", IN_LAYER(v), KV_DIM, DIM, 0},
    {"attn_output.weight", IN_LAYER(o), DIM, Q_DIM, 0},
    {"attn_q.bias", IN_LAYER(q_bias), VECTOR, Q_DIM, TURNS | OPTIONAL},
    {"attn_k.bias", IN_LAYER(k_bias), VECTOR, KV_DIM, TURNS | OPTIONAL},
    {"attn_v.bias", IN_LAYER(v_bias), VECTOR, KV_DIM, OPTIONAL},
    {"attn_output.bias", IN_LAYER(o_bias), VECTOR, DIM, OPTIONAL},
    {"attn_q_norm.weight", IN_LAYER(q_norm), VECTOR, HEAD, TURNS | OPTIONAL},
    {"attn_k_norm.weight", IN_LAYER(k_norm), VECTOR, HEAD, TURNS | OPTIONAL},
    {"ffn_norm.weight", IN_LAYER(ffn_norm), VECTOR, DIM, 0},
    {"ffn_gate.weight", IN_LAYER(gate), HIDDEN, DIM, 0},
    {"ffn_up.weight", IN_LAYER(up), HIDDEN, DIM, 0},
    {"ffn_down.weight", IN_LAYER(down), DIM, HIDDEN, 0},
    {"output_norm.weight", IN_MODEL(final_norm), VECTOR, DIM, 0},
    {"output.weight", IN_MODEL(output), VOCAB, DIM, OPTIONAL},
    {"rope_freqs.weight", IN_MODEL(rope_divisors), VECTOR, HALF_HEAD, OPTIONAL},
};
enum { N_TENSORS = sizeof tensors / sizeof *tensors };

// What the name of an architecture in a GGUF file means.
typedef struct {
    const char *name;
    bool turns_halves; // RoPE turns pairs (i, i + head_dim / 2) there: loading, or export, makes them neighbours
} Architecture;

static const Architecture architectures[] = {{"llama", false}, {"qwen2", true}, {"qwen3", true}};
enum { N_ARCHITECTURES = sizeof architectures / sizeof *architectures };

static int dim_of(const Config *c, Dim dim) {
    const int dims[] = {1, c->vocab_size, c->dim, c->hidden_dim, q_dim(c), kv_dim(c), c->head_dim, c->head_dim / 2};
    return dims[dim];
}

// Every row t of the table, for every layer l of the model where layers have it.
#define EACH_TENSOR(m, t, l) \
    for (const Tensor *t = tensors; t < tensors + N_TENSORS; t++) \
        for (int l = 0; l < tensor_copies(m, t); l++)

static int tensor_copies(const Model *m, const Tensor *t) { return t->in_layer ? m->config.n_layers : 1; }

// The field that a tensor goes to: a Matrix, or a const float *.
static void *tensor_field(const Model *m, const Tensor *t, int layer) {
    return (char *)(t->in_layer ? (void *)&m->layers[layer] : (void *)m) + t->at;
}

static Matrix *tensor_matrix(const Model *m, const Tensor *t, int layer) {
    return t->rows == VECTOR ? NULL : tensor_field(m, t, layer);
}

// --- matrices

static size_t matrix_panels(const Matrix *w) { return ((size_t)w->rows + PANEL - 1) / PANEL; }

// 4-byte words from one panel to the next.
static size_t panel_words(const Matrix *w) { return (size_t)w->cols * (size_t)type_bits(w->type) / 32 * PANEL; }

// Where column k of panel p begins. k: a multiple of the columns of a block
static const int32_t *matrix_words(const Matrix *w, size_t p, int k) {
    return (const int32_t *)w->panels + p * panel_words(w) + (size_t)k * (size_t)type_bits(w->type) / 32 * PANEL;
}

// How the scales of a matrix lie (§2): columns of a superblock; bytes of its factors, of the integers of one of its
// groups, of all that, and of a panel. Nothing where there are no scales.
typedef struct {
    int superblock;
    size_t factors, codes, bytes, panel;
} ScaleLayout;

static ScaleLayout scale_layout(const Matrix *w) {
    if (!is_quantized(w->type)) return (ScaleLayout){0};
    ScaleLayout l = {.superblock = scalings[w->scaling].superblock ? scalings[w->scaling].superblock : w->group};
    l.factors = (size_t)(scalings[w->scaling].factor_bytes * PANEL) << w->has_min;
    l.codes = (size_t)(scalings[w->scaling].code_bytes * PANEL) << (w->has_min && w->scaling != SCALE_NIBBLES);
    l.bytes = l.factors + (size_t)(l.superblock / w->group) * l.codes;
    l.panel = (size_t)(w->cols / l.superblock) * l.bytes;
    return l;
}

static size_t matrix_bytes(const Matrix *w) { return matrix_panels(w) * (panel_words(w) * 4 + scale_layout(w).panel); }

// The 16 factors and 16 integers of some scales; after each 16 those of the minima (SCALE_NIBBLES: in the same bytes).
typedef struct {
    const uint8_t *factors, *codes;
} ScalePlace;

// Those of the scales (which 0) or the minima (1), from lane on.
static inline const uint8_t *place_factors(Scaling scaling, ScalePlace at, int lane, int which) {
    return at.factors + (which * PANEL + lane) * scalings[scaling].factor_bytes;
}

static inline const uint8_t *place_codes(Scaling scaling, ScalePlace at, int lane, int which) {
    return at.codes + (scaling == SCALE_NIBBLES ? 0 : which * PANEL) + lane;
}

// A scale (which 0) or minimum (1) from its factor and its integer. Powers of two below 2^-126 are subnormal floats.
static float scale_value(Scaling scaling, float factor, uint8_t code, int which) {
    if (scaling == SCALE_POWER) return float_from_bits(code < 2 ? 0x200000u << code : (code - 1u) << 23);
    if (scaling == SCALE_PRODUCT) return factor * (float)(int8_t)code;
    if (scaling == SCALE_NIBBLES) return factor * (float)(code >> 4 * which & 15);
    return factor;
}

// And that of one lane of a place.
static float place_scale(Scaling scaling, ScalePlace at, int lane, int which) {
    const uint8_t *factor = place_factors(scaling, at, lane, which), *code = place_codes(scaling, at, lane, which);
    const int bytes = scalings[scaling].factor_bytes;
    float f = bytes == 4 ? float_from_bits(load_u32(factor)) : bytes == 2 ? float_from_f16(load_u16(factor)) : 0;
    return scale_value(scaling, f, scalings[scaling].code_bytes ? *code : 0, which);
}

// Goes along a panel, from the scales of some columns to those of the next.
typedef struct {
    ScalePlace at;
    Scaling scaling;
    int group, in_group, in_superblock; // columns of a group; of this one, and of its superblock, how many are done
    ScaleLayout layout;
} ScaleCursor;

// At column k of panel p.
static ScaleCursor cursor_open(const Matrix *w, size_t p, int k) {
    const ScaleLayout l = scale_layout(w);
    const int in_superblock = k % l.superblock;
    const uint8_t *factors = (const uint8_t *)w->scales + p * l.panel + (size_t)(k / l.superblock) * l.bytes;
    const uint8_t *codes = factors + l.factors + (size_t)(in_superblock / w->group) * l.codes;
    return (ScaleCursor){{factors, codes}, w->scaling, w->group, in_superblock % w->group, in_superblock, l};
}

static inline void cursor_advance(ScaleCursor *c, int columns) {
    c->in_group += columns;
    c->in_superblock += columns;
    if (c->in_superblock == c->layout.superblock) {
        c->at.factors += c->layout.bytes;
        c->at.codes = c->at.factors + c->layout.factors;
        c->in_group = c->in_superblock = 0;
    } else if (c->in_group == c->group) {
        c->at.codes += c->layout.codes;
        c->in_group = 0;
    }
}

// b bits of column k, from a plane whose steps for the block of k begin at `block`
static int plane_bits(const uint32_t *block, int b, int k) {
    int bit = k % 32 / 4 * b;
    return (int)(block[bit / 8 * PANEL] >> (8 * (k % 4) + bit % 8)) & ((1 << b) - 1);
}

// The integer of column k in a lane of a panel of quantised weights.
static int panel_integer(const uint32_t *panel, Type type, int lane, int k) {
    const int low = types[type].low, high = types[type].high;
    const uint32_t *block = panel + k / 32 * (low + high) * PANEL + lane;
    int code = plane_bits(block, low, k);
    if (high) code |= plane_bits(block + low * PANEL, high, k) << low;
    return types[type].values ? types[type].values[code] : is_int8(type) ? (int8_t)code : code;
}

// A row of a quantised matrix as floats: the numbers that its integers stand for.
static void quantized_row(float *out, const Matrix *w, size_t p, int lane) {
    const uint32_t *panel = (const uint32_t *)w->panels + p * panel_words(w);
    const int sum = types[w->type].sum;
    ScaleCursor cursor = cursor_open(w, p, 0);
    for (int k = 0; k < w->cols; cursor_advance(&cursor, sum)) {
        float scale = place_scale(w->scaling, cursor.at, lane, 0);
        float min = w->has_min ? place_scale(w->scaling, cursor.at, lane, 1) : 0;
        for (int end = k + sum; k < end; k++)
            out[k] = scale * (float)(panel_integer(panel, w->type, lane, k) - w->zero) + min;
    }
}

// One row of a matrix as floats: the embedding of a token.
static void matrix_row(float *out, const Matrix *w, int row) {
    size_t p = (size_t)row / PANEL;
    int lane = row % PANEL;
    const uint32_t *words = (const uint32_t *)w->panels + p * panel_words(w) + lane;
    if (is_quantized(w->type)) quantized_row(out, w, p, lane);
    for (int k = 0; k < w->cols && !is_quantized(w->type); k++) {
        if (w->type == F32) out[k] = float_from_bits(words[k * PANEL]);
        if (w->type == F16) out[k] = float_from_f16((uint16_t)(words[k / 2 * PANEL] >> k % 2 * 16));
        if (w->type == BF16) out[k] = float_from_bf16((uint16_t)(words[k / 2 * PANEL] >> k % 2 * 16));
    }
}

// Everything that a decoded token has to read: all matrices but the embedding, of which it reads one row.
static size_t model_bytes_per_token(const Model *m) {
    size_t bytes = 0;
    EACH_TENSOR(m, t, l) {
        const Matrix *w = tensor_matrix(m, t, l);
        if (w && w != &m->embed) bytes += matrix_bytes(w);
    }
    return bytes;
}

// ---------------------------------------------------------------------------------------------------------------------
// §4 Kernels
//
// Nearly all time goes into y = W x, for one row x while decoding (then it is bound by reading W from memory) and for
// hundreds while reading a prompt (then by arithmetic). Both use one shape of loop, the TILE: a few panels of W times a
// few rows of x, with the sums in registers. One step of it loads 4 bytes of each weight row (one panel: 64 bytes),
// broadcasts as many columns of each x row to all lanes, and multiplies and adds:
//
//                         16 outputs     16 outputs
//        x row 0   k ->  [ acc 0,0    ] [ acc 0,1    ]      acc[r][p] += panel p, step k * x[r][k]
//        x row 1   k ->  [ acc 1,0    ] [ acc 1,1    ]
//        ...                                                each weight that is loaded meets every row,
//        x row 5   k ->  [ acc 5,0    ] [ acc 5,1    ]      each broadcast meets every panel
//
// For every output the order of additions is the order of k, whatever the tile's size: one fused multiply-add for each
// column of float weights; for each block of quantised ones, whose columns are summed in integers, exactly. So the
// result is the same for 1 row or 500, and on every instruction set.
//
// A Floats or Ints is a vector register of LANES outputs: a vector type of gcc and clang, on which C's operators work
// lane by lane. For what has no operator there is plain C first; an instruction set replaces these few functions, and
// nothing else: only here is code for a particular processor.

// a * b + c, rounded once. A build for x86 processors without FMA rounds twice (doc/numerics.md).
static inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#define ALWAYS_INLINE static inline __attribute__((always_inline))

#if defined(RUN_PLAIN) || \
    !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) || defined(__ARM_FEATURE_DOTPROD))
enum { LANES = 4, TILE_PANELS = 1, TILE_ROWS = 3, FLOAT_ROWS = 6, DOT_OFFSET = 0 };
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
#define UNROLL // here the compiler knows better
#define EACH_LANE for (int i = 0; i < LANES; i++)
ALWAYS_INLINE Floats floats_fma(Floats a, Floats b, Floats c) {
    EACH_LANE c[i] = fma1(a[i], b[i], c[i]);
    return c;
}
ALWAYS_INLINE Floats floats_load_f16(const uint16_t *p) {
    Floats v = {0};
    EACH_LANE v[i] = float_from_f16(p[i]);
    return v;
}
ALWAYS_INLINE void floats_store_f16(uint16_t *p, Floats v) { EACH_LANE p[i] = f16_from_float(v[i]); }
// LANES neighbouring int8.
ALWAYS_INLINE Ints ints_load_int8(const uint8_t *p) {
    Ints v = {0};
    EACH_LANE v[i] = (int8_t)p[i];
    return v;
}
// The lower f16 of each 4-byte step, as floats.
ALWAYS_INLINE Floats floats_from_f16_low(Ints v) {
    Floats f = {0};
    EACH_LANE f[i] = float_from_f16((uint16_t)v[i]);
    return f;
}
// acc += the dot product of the 4 int8 of w and the 4 of x that each lane holds.
ALWAYS_INLINE Ints ints_dot_int8(Ints acc, Ints w, Ints x) {
    const int8_t *a = (const int8_t *)&w, *b = (const int8_t *)&x;
    EACH_LANE for (int j = 0; j < 4; j++) acc[i] += a[4 * i + j] * b[4 * i + j];
    return acc;
}
#define ints_dot_small ints_dot_int8
// The values that the 16 codes in the bytes of v stand for.
ALWAYS_INLINE Ints ints_lookup(const int8_t values[16], Ints v) {
    int8_t *code = (int8_t *)&v;
    for (int i = 0; i < 4 * LANES; i++) code[i] = values[code[i]];
    return v;
}

#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
// vpdpbusd multiplies unsigned by signed bytes. XOR 0x80 turns an int8 w into w + 128, so that the dot product comes
// out too large by 128 * sum(x): it starts at minus that.
enum { LANES = 16, TILE_PANELS = 2, TILE_ROWS = 6, FLOAT_ROWS = 12, DOT_OFFSET = 128 };
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
#define floats_fma(a, b, c) (Floats) _mm512_fmadd_ps(a, b, c)
#define floats_load_f16(p) (Floats) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define floats_store_f16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define ints_load_int8(p) (Ints) _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(p)))
#define floats_from_f16_low(v) (Floats) _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(v)))
#define ints_dot_int8(acc, w, x) (Ints) _mm512_dpbusd_epi32((__m512i)(acc), (__m512i)(w), (__m512i)(x))
#define ints_dot_small ints_dot_int8
#define ints_lookup(values, v) \
    (Ints) _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(values))), (__m512i)(v))
#ifdef __AVX512BF16__
#define floats_dot_bf16(acc, w, x) (Floats) _mm512_dpbf16_ps(acc, (__m512bh)(w), (__m512bh)(x))
#endif

#elif defined(__AVX2__)
#include <immintrin.h>
enum { LANES = 8, TILE_PANELS = 1, TILE_ROWS = 3, FLOAT_ROWS = 6, DOT_OFFSET = 0 };
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
#define floats_fma(a, b, c) (Floats) _mm256_fmadd_ps(a, b, c)
#define floats_load_f16(p) (Floats) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define floats_store_f16(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define ints_load_int8(p) (Ints) _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(p)))
ALWAYS_INLINE Floats floats_from_f16_low(Ints v) { // gather the low halves of 8 words into 8 neighbouring halves
    __m256i low = _mm256_blend_epi16((__m256i)v, _mm256_setzero_si256(), 0xAA);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
#define ints_lookup(values, v) \
    (Ints) _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(values))), (__m256i)(v))
// maddubs multiplies unsigned by signed bytes, and sums pairs in 16 bits: 2 * 128 * 127 fits. int8: |w| and x with the
// sign of w.
ALWAYS_INLINE Ints ints_dot_small(Ints acc, Ints w, Ints x) {
    return acc + (Ints)_mm256_madd_epi16(_mm256_maddubs_epi16((__m256i)w, (__m256i)x), _mm256_set1_epi16(1));
}
ALWAYS_INLINE Ints ints_dot_int8(Ints acc, Ints w, Ints x) {
    return ints_dot_small(acc, (Ints)_mm256_abs_epi8((__m256i)w), (Ints)_mm256_sign_epi8((__m256i)x, (__m256i)w));
}

#else // NEON with dot products (ARMv8.2)
#include <arm_neon.h>
enum { LANES = 4, TILE_PANELS = 1, TILE_ROWS = 3, FLOAT_ROWS = 6, DOT_OFFSET = 0 };
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
#define floats_fma(a, b, c) (Floats) vfmaq_f32((float32x4_t)(c), (float32x4_t)(a), (float32x4_t)(b))
#define floats_load_f16(p) (Floats) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define floats_store_f16(p, v) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(v))))
#define ints_load_int8(p) (Ints) vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(load_u32(p)))))
#define floats_from_f16_low(v) (Floats) vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32((int32x4_t)(v))))
#define ints_dot_int8(acc, w, x) (Ints) vdotq_s32((int32x4_t)(acc), (int8x16_t)(w), (int8x16_t)(x))
#define ints_dot_small ints_dot_int8
#define ints_lookup(values, v) (Ints) vqtbl1q_s8(vld1q_s8(values), (uint8x16_t)(v))
#endif

ALWAYS_INLINE Ints ints_load(const void *p) {
    Ints v;
    memcpy(&v, p, sizeof v);
    return v;
}

ALWAYS_INLINE Floats floats_load(const void *p) { return (Floats)ints_load(p); }

ALWAYS_INLINE void ints_store(void *p, Ints v) { memcpy(p, &v, sizeof v); }
ALWAYS_INLINE void floats_store(float *p, Floats v) { memcpy(p, &v, sizeof v); }

// All lanes x. (Minus zero changes nothing, not even the sign of another zero.)
ALWAYS_INLINE Floats floats_set(float x) { return x - (Floats){0}; }
ALWAYS_INLINE Ints ints_set(int32_t x) { return x - (Ints){0}; }

// All lanes the 4 bytes at p.
ALWAYS_INLINE Ints ints_splat(const void *p) { return (Ints)floats_set(float_from_bits(load_u32(p))); }
ALWAYS_INLINE Floats floats_splat(const void *p) { return (Floats)ints_splat(p); }
ALWAYS_INLINE Floats floats_from_ints(Ints v) { return __builtin_convertvector(v, Floats); }

// acc += the dot product of the 2 bf16 of w and the 2 of x that each lane holds, the higher column first: so does
// vdpbf16ps. A product of two bf16, which are the upper halves of floats, is exact as a float; each addition rounds.
#ifndef floats_dot_bf16
ALWAYS_INLINE Floats floats_dot_bf16(Floats acc, Ints w, Ints x) {
    const int32_t upper = (int32_t)0xffff0000;
    acc = floats_fma((Floats)(w & upper), (Floats)(x & upper), acc);
    return floats_fma((Floats)(w << 16), (Floats)(x << 16), acc);
}
#endif

enum { PANEL_VECTORS = PANEL / LANES, TILE_VECTORS = TILE_PANELS * PANEL_VECTORS, AHEAD = 96 };

// Where vector v of a tile starts, relative to the tile's first panel. `panel`: elements from one panel to the next.
static inline size_t vector_offset(int v, size_t panel) {
    return (size_t)(v / PANEL_VECTORS) * panel + (size_t)(v % PANEL_VECTORS) * LANES;
}

#ifndef UNROLL
#define UNROLL _Pragma("GCC unroll 16")
#endif
#define EACH_ROW UNROLL for (int r = 0; r < n_rows; r++)
#define EACH_VECTOR UNROLL for (int v = 0; v < n_panels * PANEL_VECTORS; v++)

// Float weights as a tile sees them. Attention uses it too: a cache of keys is a matrix, and so is a cache of values.
typedef struct {
    Type type;          // F32, F16, BF16
    const uint32_t *w;  // the first panel
    size_t step, panel; // 4-byte words from one step to the next, from one panel to the next
    int cols;
    ptrdiff_t ahead; // words to what one tile alone will want next
} FloatPanels;

// What a tile multiplies, and where the result goes: y[r] = W x[r]
typedef struct {
    FloatPanels floats;        // float weights, and their
    const void *x;             // rows of floats, or of pairs of bf16 for BF16,
    size_t x_stride;           // so many 4-byte words apart
    const struct Chunk *chunk; // quantised weights: some columns of them,
    const Activations *in;     // and the rows of x
    float *y;
    size_t y_stride;
    int row; // the first row of x and y, in the tile
    // Weights come from memory, and a processor's own prefetching ends where a page of 4 KB ends: each page would begin
    // with a wait. So a tile asks for weights some steps before it needs them. Where the rows take several tiles, only
    // the first would find its weights in memory; so all of them, taking turns, ask for the panels that come next. (Of
    // quantised weights the first tile of each chunk asks for the next: the others take their words from the chunk.)
    size_t steps_ahead; // AHEAD where one tile takes all rows
    int turn, tiles;    // each asks for every tiles-th step, and begins one later than the tile before it
} Tile;

static inline float *tile_row(const Tile *t, int r) { return t->y + (size_t)(t->row + r) * t->y_stride; }

// Asks for the lines that a tile will write. Otherwise these writes wait for memory, and everything after them.
ALWAYS_INLINE void prefetch_outputs(int n_panels, int n_rows, const Tile *t) {
    EACH_ROW EACH_VECTOR __builtin_prefetch(tile_row(t, r) + vector_offset(v, PANEL), 1);
}

// One tile of float weights. n_panels, n_rows and the type are constants where it is inlined, so that acc is registers.
ALWAYS_INLINE void tile_float(int n_panels, int n_rows, Type type, const Tile *t) {
    const FloatPanels p = t->floats;
    const uint32_t *w = p.w;
    const size_t x_stride = t->x_stride;
    const char *x = (const char *)t->x + 4 * (size_t)t->row * x_stride;
    Floats acc[FLOAT_ROWS][TILE_VECTORS];
    EACH_ROW EACH_VECTOR acc[r][v] = floats_set(0);
    prefetch_outputs(n_panels, n_rows, t);
    const int tiles = t->tiles;
    const ptrdiff_t ahead = tiles == 1 ? p.ahead : (ptrdiff_t)(t->steps_ahead * p.step);
    int turn = t->turn;
    for (int k = 0; k < p.cols; k += step_columns(type), w += p.step) {
        Ints step[TILE_VECTORS];
        turn = turn ? turn - 1 : tiles - 1;
        EACH_VECTOR {
            const uint32_t *at = w + vector_offset(v, p.panel);
            if (turn == 0) __builtin_prefetch(at + ahead);
            step[v] = ints_load(at);
        }
        EACH_ROW {
            const char *xk = x + 4 * ((size_t)r * x_stride + (size_t)(type == BF16 ? k / 2 : k));
            EACH_VECTOR {
                if (type == F32) acc[r][v] = floats_fma((Floats)step[v], floats_splat(xk), acc[r][v]);
                if (type == BF16) acc[r][v] = floats_dot_bf16(acc[r][v], step[v], ints_splat(xk));
                if (type == F16) {
                    acc[r][v] = floats_fma(floats_from_f16_low(step[v]), floats_splat(xk), acc[r][v]);
                    acc[r][v] = floats_fma(floats_from_f16_low(step[v] >> 16), floats_splat(xk + 4), acc[r][v]);
                }
            }
        }
    }
    EACH_ROW EACH_VECTOR floats_store(tile_row(t, r) + vector_offset(v, PANEL), acc[r][v]);
}

// --- quantised weights
//
// A row that is alone meets the weights as they lie in memory: a tile takes words of 4 integers out of their planes,
// and scales out of their superblocks, as it goes. Where there are more rows this would be done again for each tile; so
// some columns of the panels, a CHUNK, are made ready first, for all rows: in words, with scales as floats.

enum { CHUNK = 512 }; // columns: their words and a strip of rows fit into the fastest cache

typedef struct Chunk {
    const Matrix *w;
    size_t first_panel;
    int column, cols;     // where in the matrix it begins, and how many columns it has
    const int32_t *words; // of the first panel: in the matrix, or `unpacked`
    size_t panel;         // from one panel to the next
    float scale[CHUNK / 16][TILE_PANELS * PANEL], min[CHUNK / 16][TILE_PANELS * PANEL]; // for each sum of integers
    int32_t unpacked[TILE_PANELS][CHUNK / 4 * PANEL];
} Chunk;

// Word i of a block of 32 columns: for each of its 4 columns, in a byte, b bits from a plane, moved up by `up`
ALWAYS_INLINE Ints plane_word(const int32_t *plane, int b, int i, int up) {
    const int right = i * b % 8 - up;
    Ints step = ints_load(plane + i * b / 8 * PANEL);
    return (right < 0 ? step << -right : step >> right) & (int32_t)(low_bits(b) << up);
}

// Word i of a block. The type is a constant where this is inlined.
ALWAYS_INLINE Ints block_word(Type type, const int32_t *block, int i) {
    const int low = types[type].low, high = types[type].high;
    Ints word = plane_word(block, low, i, 0);
    if (high) word |= plane_word(block + low * PANEL, high, i, low);
    return types[type].values ? ints_lookup(types[type].values, word) : word;
}

// Columns of a panel as words.
ALWAYS_INLINE void unpack_blocks(Type type, const int32_t *block, int cols, int32_t *words) {
    for (int k = 0; k < cols; k += BLOCK, block += type_bits(type) * PANEL, words += BLOCK / 4 * PANEL)
        for (int lane = 0; lane < PANEL; lane += LANES)
            UNROLL for (int i = 0; i < BLOCK / 4; i++)
                ints_store(words + i * PANEL + lane, block_word(type, block + lane, i));
}

// All types that lie in planes.
#define EACH_PLANE_TYPE(DO) DO(I4) DO(I5) DO(I6) DO(I3) DO(I2) DO(IQ4) DO(FP4)
#define UNPACK(t) \
    if (type == t) unpack_blocks(t, block, cols, words);
static void unpack_panel(Type type, const int32_t *block, int cols, int32_t *words) { EACH_PLANE_TYPE(UNPACK); }

// The scales (which 0) or minima (1) of one vector of lanes, as scale_value says.
ALWAYS_INLINE Floats cursor_scales(const ScaleCursor *c, int lane, int which) {
    const uint8_t *factors = place_factors(c->scaling, c->at, lane, which);
    if (c->scaling == SCALE_F16) return floats_load_f16((const uint16_t *)factors);
    if (c->scaling == SCALE_F32) return floats_load(factors);
    const Ints code = ints_load_int8(place_codes(c->scaling, c->at, lane, which));
    if (c->scaling == SCALE_PRODUCT) return floats_load_f16((const uint16_t *)factors) * floats_from_ints(code);
    if (c->scaling == SCALE_NIBBLES)
        return floats_load_f16((const uint16_t *)factors) * floats_from_ints(code >> 4 * which & 15);
    const Ints power = code & 255, subnormal = power < 2;
    return (Floats)((0x200000 << power & subnormal) | ((power - 1) << 23 & ~subnormal));
}

// Makes a chunk of n_panels panels ready for strips of several rows.
static void chunk_unpack(Chunk *c, int n_panels) {
    const Matrix *w = c->w;
    const int sum = types[w->type].sum;
    for (int p = 0; p < n_panels; p++) {
        const int32_t *words = c->words + (size_t)p * panel_words(w);
        if (!is_int8(w->type)) unpack_panel(w->type, words, c->cols, c->unpacked[p]);
        ScaleCursor cursor = cursor_open(w, c->first_panel + (size_t)p, c->column);
        const size_t ahead = cursor.layout.panel * CHUNK / (size_t)w->cols; // to the scales of the next chunk
        for (size_t i = 0; i < ahead; i += 64) __builtin_prefetch(cursor.at.factors + ahead + i);
        for (int i = 0; i < c->cols / sum; i++, cursor_advance(&cursor, sum))
            for (int lane = 0; lane < PANEL; lane += LANES) {
                floats_store(c->scale[i] + p * PANEL + lane, cursor_scales(&cursor, lane, 0));
                if (w->has_min) floats_store(c->min[i] + p * PANEL + lane, cursor_scales(&cursor, lane, 1));
            }
    }
    if (is_int8(w->type)) return;
    c->words = c->unpacked[0];
    c->panel = CHUNK / 4 * PANEL;
}

// Asks for the steps of a block that lie AHEAD of those of column k.
ALWAYS_INLINE void prefetch_block(int n_panels, const Matrix *w, const int32_t *words, int k) {
    const int bits = type_bits(w->type);
    const int32_t *ahead = words + (k / BLOCK * bits + AHEAD) * PANEL;
    for (int p = 0; p < n_panels; p++, ahead += panel_words(w))
        for (int i = 0; i < bits; i++) __builtin_prefetch(ahead + i * PANEL);
}

// One tile of quantised weights. Some columns (16 or 32) are summed in integers, then meet the scales:
// y = sum over these of (sum (q_w - zero) q_x) * (scale_w * scale_x) + min_w * (scale_x * sum q_x)
// Where the weights come with an offset (2^shift: a zero, DOT_OFFSET), the integers start at -offset * sum q_x.
ALWAYS_INLINE void tile_quantized(Type type, int n_panels, int n_rows, int strip, const Tile *t) {
    static const int32_t zeros[N_SUMS * STRIP];
    const bool has_sign = is_int8(type) || types[type].values, alone = strip == 1;
    const int sum = types[type].sum;
    const Chunk *c = t->chunk;
    const Matrix *w = c->w;
    const Activations *x = t->in;
    const int offset = has_sign ? DOT_OFFSET : w->zero, shift = offset ? __builtin_ctz((unsigned)offset) : 0;
    const size_t row = (size_t)t->row, column = (size_t)c->column, height = (size_t)strip, panel = c->panel;
    const size_t sums = strip_sums(x->stride, height, row, column), next = offset ? N_SUMS * height : 0;
    const int32_t *block = c->words, *q = x->q + strip_index(x->stride, height, row, column, 4);
    const int32_t *minus = offset ? x->minus + sums : zeros;
    const float *scale_x = x->scale + strip_index(x->stride, height, row, column, BLOCK), *sum_x = x->sum + sums;
    const bool has_min = w->has_min;
    ScaleCursor cursor = alone ? cursor_open(w, c->first_panel, c->column) : (ScaleCursor){0};
    const size_t scales_ahead = alone ? AHEAD * 32 / type_bits(type) * cursor.layout.panel / (size_t)w->cols : 0;
    const int32_t *from_memory = matrix_words(w, c->first_panel, c->column);
    Floats acc[TILE_ROWS][TILE_VECTORS];
    if (c->column) EACH_ROW EACH_VECTOR acc[r][v] = floats_load(tile_row(t, r) + vector_offset(v, PANEL));
    else EACH_ROW EACH_VECTOR acc[r][v] = floats_set(0);
    for (int k = 0; k < c->cols; k += BLOCK) {
        if (row == 0) prefetch_block(n_panels, w, from_memory, k);
        UNROLL for (int part = 0; part < 2; part++) { // or just one
            const int which = sum == BLOCK ? SUM_ALL : SUM_FIRST + part, i = k / sum + part;
            Ints dot[TILE_ROWS][TILE_VECTORS];
            if (sum * part == BLOCK || (type == I8_16 && k + 16 * part == c->cols))
                continue; // or half a block was left
            EACH_ROW EACH_VECTOR dot[r][v] = ints_set(minus[which * strip + r]) << shift;
            UNROLL for (int word = 0; word < sum / 4; word++, q += strip) EACH_VECTOR {
                Ints q_w = block_word(type, block + vector_offset(v, panel), part * sum / 4 + word);
                if (has_sign && DOT_OFFSET) q_w ^= (int32_t)0x80808080;
                EACH_ROW dot[r][v] = has_sign ? ints_dot_int8(dot[r][v], q_w, ints_set(q[r]))
                                              : ints_dot_small(dot[r][v], q_w, ints_set(q[r]));
            }
            EACH_VECTOR {
                Floats scale = alone ? cursor_scales(&cursor, v * LANES, 0) : floats_load(c->scale[i] + v * LANES);
                EACH_ROW acc[r][v] = floats_fma(floats_from_ints(dot[r][v]), scale * scale_x[r], acc[r][v]);
            }
            if (has_min) EACH_VECTOR {
                    Floats min = alone ? cursor_scales(&cursor, v * LANES, 1) : floats_load(c->min[i] + v * LANES);
                    EACH_ROW acc[r][v] = floats_fma(min, floats_set(sum_x[which * strip + r]), acc[r][v]);
                }
            if (!alone) continue;
            __builtin_prefetch(cursor.at.codes + scales_ahead);
            cursor_advance(&cursor, sum);
        }
        block += type_bits(type) * PANEL;
        scale_x += strip; // the next block of x
        sum_x += N_SUMS * strip;
        minus += next;
    }
    EACH_ROW EACH_VECTOR floats_store(tile_row(t, r) + vector_offset(v, PANEL), acc[r][v]);
}

ALWAYS_INLINE void tile(Type type, int n_panels, int n_rows, int strip, const Tile *t) {
    if (is_quantized(type)) tile_quantized(type, n_panels, n_rows, strip, t);
    else tile_float(n_panels, n_rows, type, t);
}

// The tile of one type, width (1 panel, or TILE_PANELS) and height: the compiler copies the code for each case.
// Height ALONE is a row that is a strip of its own.
enum { ALONE, WIDE = 16, EACH_TYPE = 32 };
#define CASE(type, wide, height) \
    case type *EACH_TYPE + wide + height: \
        if (height <= (is_quantized(type) ? (int)TILE_ROWS : (int)FLOAT_ROWS) && (TILE_PANELS > 1 || !wide)) \
            tile(type, wide ? TILE_PANELS : 1, height == ALONE ? 1 : height, height == ALONE ? 1 : STRIP, t); \
        break;
#define HEIGHTS(type, wide) \
    CASE(type, wide, 1) \
    CASE(type, wide, 2) \
    CASE(type, wide, 3) \
    CASE(type, wide, 4) \
    CASE(type, wide, 6) \
    CASE(type, wide, 8) \
    CASE(type, wide, 12)
#define SHAPES(type) HEIGHTS(type, 0) HEIGHTS(type, WIDE)
#define CASE_ALONE(type) CASE(type, 0, ALONE)

static void tile_of_shape(Type type, int n_panels, int height, const Tile *t) {
    switch ((int)type * EACH_TYPE + (n_panels > 1 ? WIDE : 0) + height) {
        SHAPES(F32)
        SHAPES(F16)
        SHAPES(BF16)
        SHAPES(I8)
        SHAPES(I8_16)
        SHAPES(U8)
        SHAPES(U8_16)
        EACH_PLANE_TYPE(CASE_ALONE)
        CASE_ALONE(I8)
        CASE_ALONE(I8_16)
    }
}

// y[r] = W x[r] for n_rows rows and at most TILE_PANELS panels: the highest tiles that there are, then lower ones
static void multiply(Type type, int n_panels, int n_rows, Tile *t) {
    int most = is_quantized(type) ? (int)TILE_ROWS : (int)FLOAT_ROWS;
    t->tiles = (n_rows + most - 1) / most;
    if (t->tiles == 1) t->steps_ahead = AHEAD;
    bool alone = is_quantized(type) && t->in->strip == 1;
    t->row = t->turn = 0;
    for (int height; t->row < n_rows; t->row += height, t->turn++) {
        int left = n_rows - t->row;
        height = left >= most ? most : left >= 8 ? 8 : left >= 6 ? 6 : min_int(left, 4);
        tile_of_shape(type, n_panels, alone ? ALONE : height, t);
    }
}

// y[r] = W x[r] for n_rows rows and n_panels panels of float weights, one thread. x: floats, or pairs of bf16 for BF16.
// Strides are in 4-byte words. Rows of y have room for whole panels.
static void multiply_float(int n_panels, int n_rows, FloatPanels w, const void *x, size_t x_stride, float *y,
                           size_t y_stride) {
    Tile t = {.floats = w, .x = x, .x_stride = x_stride, .y = y, .y_stride = y_stride};
    for (int p = 0; p < n_panels; p += TILE_PANELS, t.floats.w += TILE_PANELS * w.panel, t.y += TILE_PANELS * PANEL) {
        t.steps_ahead = w.panel / w.step * TILE_PANELS;
        multiply(w.type, min_int(TILE_PANELS, n_panels - p), n_rows, &t);
    }
}

// The same for at most TILE_PANELS panels of quantised weights.
static void multiply_quantized(int n_panels, int n_rows, const Matrix *w, size_t first_panel, const Activations *x,
                               float *y, size_t y_stride) {
    const Type words = types[w->type].values ? I8 : types[w->type].sum == BLOCK ? U8 : U8_16; // what planes become
    const bool alone = x->strip == 1;
    const Type type = alone || is_int8(w->type) ? w->type : words;
    _Alignas(64) Chunk c;
    Tile t = {.chunk = &c, .in = x, .y = y, .y_stride = y_stride};
    c.w = w;
    c.first_panel = first_panel;
    c.cols = alone ? w->cols : CHUNK;
    for (c.column = 0; c.column < w->cols; c.column += c.cols) {
        c.cols = min_int(c.cols, w->cols - c.column);
        c.words = matrix_words(w, first_panel, c.column);
        c.panel = panel_words(w);
        if (!alone) chunk_unpack(&c, n_panels);
        multiply(type, n_panels, n_rows, &t);
    }
}

// y[r] = W x[r], r < n_rows. y: [n_rows, y_stride], y_stride >= rows rounded up to whole panels. Every thread of a
// parallel region calls it; they share the panels. Neighbouring panels go to one thread: long runs of memory are what
// the memory system likes. A thread returns when its share is done, so that products of the same x can follow without
// a pause; who reads y waits at a barrier first.
static void matmul(float *y, size_t y_stride, const Activations *x, int n_rows, const Matrix *w) {
    int n_panels = (int)matrix_panels(w);
    int few = is_quantized(w->type) ? TILE_ROWS : 1, most = n_rows <= few ? 1 : TILE_PANELS; // runs of memory at once
#pragma omp for schedule(static) nowait
    for (int p = 0; p < n_panels; p += most) {
        int n = min_int(most, n_panels - p);
        float *out = y + (size_t)p * PANEL;
        if (is_quantized(w->type)) {
            multiply_quantized(n, n_rows, w, (size_t)p, x, out, y_stride);
        } else {
            const uint32_t *first = (const uint32_t *)w->panels + (size_t)p * panel_words(w);
            FloatPanels panels = {w->type, first, PANEL, panel_words(w), w->cols, AHEAD * PANEL};
            const void *from = w->type == BF16 ? (const void *)x->pairs : x->f;
            multiply_float(n, n_rows, panels, from, w->type == BF16 ? x->stride / 2 : x->stride, out, y_stride);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §5 Layers
//
// The small functions between the matrix products, each on one row. Loops over 16 lanes become vector instructions; a
// sum goes through 16 partial sums and then a tree, in one fixed order.

enum { SUM_LANES = 16 };

// Sum of the lanes, pairwise: 8 + 8, 4 + 4, ...
static float sum_lanes(float lane[SUM_LANES]) {
    for (int width = SUM_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
}

// The largest of x; -infinity where nothing is larger. x: [n padded to 16]. (A maximum for each lane: vectors again.)
static float maximum(float *x, int n) {
    float lane[SUM_LANES], highest = -INFINITY;
    for (int j = 0; j < SUM_LANES; j++) lane[j] = -INFINITY;
    for (int i = n; i % SUM_LANES; i++) x[i] = -INFINITY;
    for (int i = 0; i < n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int j = 0; j < SUM_LANES; j++) highest = lane[j] > highest ? lane[j] : highest;
    return highest;
}

// e^x, relative error below 1e-7. Our own, because libraries differ in the last bit and do not vectorise. Below -87
// the result is 0, above 88 it stays at e^88: within these 2^n is a normal float. With n = round(x / ln 2) and
// r = x - n ln 2, |r| <= ln 2 / 2:
// e^x = 2^n e^r, e^r = 1 + r + r^2/2! + ... + r^7/7!
static inline float exp_f32(float x) {
    float clamped = x > 88.0f ? 88.0f : x;
    clamped = clamped < -87.0f ? -87.0f : clamped;
    float shifted = fma1(clamped, 1.44269504f, 12582912.0f); // + 1.5 * 2^23: n sits in the low bits
    float n = shifted - 12582912.0f;
    float r = fma1(n, -0.693359375f, clamped); // ln 2 in two parts, the first exact in 10 bits
    r = fma1(n, 2.12194440e-4f, r);
    float p = fma1(1.0f / 5040, r, 1.0f / 720); // Horner's rule
    p = fma1(p, r, 1.0f / 120);
    p = fma1(p, r, 1.0f / 24);
    p = fma1(p, r, 1.0f / 6);
    p = fma1(p, r, 0.5f);
    p = fma1(p, r, 1);
    p = fma1(p, r, 1);
    float power = float_from_bits((bits_of_float(shifted) + 127) << 23); // 2^n: n + bias as the exponent field
    return x < -87.0f ? 0 : p * power;
}

// out = x / sqrt(mean(x^2) + eps) * weight. x, weight, out: [n]. Ref: Zhang & Sennrich 2019, eq. 4.
static void rmsnorm(float *out, const float *x, const float *weight, int n, float eps) {
    float lane[SUM_LANES] = {0};
    int i = 0;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lane[j] = fma1(x[i + j], x[i + j], lane[j]);
    for (int j = 0; i + j < n; j++) lane[j] = fma1(x[i + j], x[i + j], lane[j]);
    float scale = 1.0f / sqrtf(sum_lanes(lane) / (float)n + eps);
    for (i = 0; i < n; i++) out[i] = weight[i] * (x[i] * scale);
}

// x[i] = e^(x[i] - max), and the sum of these: divided by it, x is the softmax. x: [n padded to 16]
static float exp_and_sum(float *x, int n, float max) {
    float lane[SUM_LANES] = {0};
    for (int i = n; i % SUM_LANES; i++) x[i] = -INFINITY;
    for (int i = 0; i < n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) {
            x[i + j] = exp_f32(x[i + j] - max);
            lane[j] += x[i + j];
        }
    return sum_lanes(lane);
}

// YaRN leaves pairs that turn often within the original context as they are, slows those that turn less than once by
// the whole factor, and blends between 32 turns and 1. Returns how much of the slowing pair i gets, 0 to 1.
// Ref: Peng et al. 2023, eq. 17-18 and section 3.4 (beta 32, alpha 1).
static double yarn_share(const Config *c, int i) {
    double pairs[2], turns[2] = {32, 1};
    for (int j = 0; j < 2; j++) // the (fractional) pair that turns so often: n_ctx * base^(-2i / head_dim) = 2 pi turns
        pairs[j] = c->head_dim * log(c->rope_n_ctx / (turns[j] * 2 * M_PI)) / (2 * log(c->rope_base));
    double low = fmax(floor(pairs[0]), 0), high = fmin(ceil(pairs[1]), c->head_dim - 1);
    return fmin(fmax((i - low) / fmax(high - low, 0.001), 0), 1);
}

// RoPE turns pair i of a head by pos * base^(-2i / head_dim) radians (Su et al. 2021, eq. 15). A model stretched to a
// longer context turns more slowly: with linear scaling (Chen et al. 2023) every pair by the factor, with YaRN some of
// them; NTK-aware scaling raises the base so that the slowest pair turns more slowly by the factor, the fastest not at
// all (Peng et al. 2023, eq. 16: base * factor^(head_dim / (head_dim - 2))); Llama 3 brings a list of divisors.
static void rope_prepare(Model *m) {
    const Config *c = &m->config;
    bool ntk = c->rope_scaling == ROPE_NTK && c->head_dim > 2;
    double base = c->rope_base * (ntk ? pow(c->rope_factor, c->head_dim / (c->head_dim - 2.0)) : 1);
    free(m->rope_freqs);
    m->rope_freqs = alloc((size_t)c->head_dim / 2, sizeof *m->rope_freqs, "RoPE frequencies");
    m->rope_magnitude = c->rope_scaling == ROPE_YARN ? (float)(0.1 * log(c->rope_factor) + 1) : 1;
    for (int i = 0; i < c->head_dim / 2; i++) {
        double freq = pow(base, -2.0 * i / c->head_dim);
        double share = c->rope_scaling == ROPE_YARN ? yarn_share(c, i) : c->rope_scaling == ROPE_LINEAR;
        double divisor = m->rope_divisors ? (double)m->rope_divisors[i] : 1;
        m->rope_freqs[i] = (freq * (1 - share) + freq / c->rope_factor * share) / divisor;
    }
}

// Stretch the context by a factor, in place of what the file says. (Divisors stay: the model was trained with them.)
static void rope_stretch(Model *m, RopeScaling scaling, double factor) {
    Config *c = &m->config;
    if (c->rope_scaling == ROPE_UNSCALED) c->rope_n_ctx = c->n_ctx_train;
    c->rope_scaling = scaling;
    c->rope_factor = factor;
    c->n_ctx_train = (int)fmin(c->rope_n_ctx * factor, 1 << 26);
    rope_prepare(m);
}

// cos and sin of the angle of every pair at a position: turns[2i], turns[2i + 1]. In double: at position 100,000 a
// float angle would be off by up to 1/200 of a radian.
static void rope_turns(float *turns, const Model *m, int pos) {
    for (int i = 0; i < m->config.head_dim / 2; i++) {
        turns[2 * i] = (float)cos(pos * m->rope_freqs[i]) * m->rope_magnitude;
        turns[2 * i + 1] = (float)sin(pos * m->rope_freqs[i]) * m->rope_magnitude;
    }
}

// Turn each pair (x[2i], x[2i + 1]) of a head by its angle. Ref: Su et al. 2021, eq. 34.
static void rope(float *x, const float *turns, int head_dim) {
    for (int i = 0; i < head_dim; i += 2) {
        float a = x[i], b = x[i + 1], c = turns[i], s = turns[i + 1];
        x[i] = fma1(a, c, -(b * s));
        x[i + 1] = fma1(a, s, b * c);
    }
}

// out = silu(gate) * up, silu(z) = z / (1 + e^-z). Ref: Shazeer 2020, eq. 6 (SwiGLU).
static void swiglu(float *out, const float *gate, const float *up, int n) {
    for (int i = 0; i < n; i++) out[i] = gate[i] / (1.0f + exp_f32(-gate[i])) * up[i];
}

// ---------------------------------------------------------------------------------------------------------------------
// §6 Session
//
// What changes while a model runs. Foremost the KEY/VALUE CACHE: attention at a position looks at the keys and values
// of all earlier positions, and these never change, so they are kept instead of computed again for every new token.
//
//     bytes per token = 2 (key and value) * n_layers * n_kv_heads * head_dim * bytes per element
//
// For each sequence, layer and kv head there is a run of keys and a run of values, with room for n_ctx positions:
//
//     keys     panels of 16 positions, [n_ctx / 16][head_dim][16]: a matrix whose rows are positions, so q . k for all
//              positions is the product of §4
//     values   row after row, [n_ctx][head_dim padded to 16]: for sum_t p_t v_t the lanes are the elements of v and the
//              steps are the positions, the same product again
//
// As f32 a step is one element, as f16 two: of keys two neighbouring elements, of values those of two neighbouring
// positions. Halves take half the memory and, in a long context, half the time; what they lose is far below what 8-bit
// weights have lost already, so they are the choice for every model whose weights are not f32. As int8 (q8), blocks of
// 32 elements share a scale, as activations do (quantize_block): 9/16 of the memory of halves. Attention turns them
// into floats again, some positions at a time.
//
// With a SLIDING WINDOW a row sees only the newest positions, and the cache need not hold more: it becomes a ring, and
// position t lies in slot t mod n_slots. The rows of one forward are stored before the first of them attends, so the
// ring holds the window and the largest chunk.
//
// The operating system commits pages as they are touched: a long context costs nothing until it is used.

// The unit of work: one token at one position of one sequence.
typedef struct {
    int token, pos, seq;
    bool want_logits;
} Row;

enum {
    ATTENTION_BLOCK = 256,  // positions that attention handles at a time, at fixed places: multiples of this
    ATTENTION_QUERIES = 64, // queries that share a pass over the keys and values, at most (or one row's group of heads)
};

// The online softmax of a query: what its blocks so far have come to, and by what the newest has shrunk the others.
typedef struct {
    float max, sum, rescale;
} Softmax;

// What one thread needs to attend with.
typedef struct {
    float *q;          // [queries, head_dim]
    float *scores;     // [queries, ATTENTION_BLOCK]
    float *unpacked;   // [ATTENTION_BLOCK, head_dim padded]   a block of int8 keys, or values, as floats
    float *part, *out; // [queries, head_dim padded]
    Softmax *softmax;  // [queries]
} Scratch;

// Neighbouring rows of one sequence, which attend together.
typedef struct {
    int first, count;
} Span;

typedef struct {
    const Model *model;
    Type kv_type; // F32, F16 or I8
    int n_ctx, n_seqs, max_rows, max_logits, n_threads;
    int n_slots;                   // positions that the cache of a sequence holds: n_ctx, or fewer in a ring
    int span_rows;                 // rows in a span, at most
    size_t key_words, value_words; // 4-byte words of one key, and of one value, in one kv head
    size_t v_stride;               // head_dim in whole panels; and so the widths of what matrices write:
    size_t dim_stride, q_stride, kv_stride, hidden_stride, vocab_stride;
    int *lost;        // [n_seqs]   a ring has overwritten what it had of positions before this one
    float *x;         // [max_rows, dim_stride]      the residual stream
    Activations in;   // [max_rows, widest]          what the next matrices multiply
    float *q;         // [max_rows, q_stride]
    float *k, *v;     // [max_rows, kv_stride]
    float *branch;    // [max_rows, dim_stride]      what attention or feed-forward adds to x
    float *gate, *up; // [max_rows, hidden_stride]
    float *turns;     // [max_rows, head_dim]        RoPE: cos and sin at each row's position
    float *logits;    // [max_logits, vocab_stride]
    int *wanted;      // [max_logits]                the rows they belong to
    Row *rows;        // [max_rows]                  for the caller of forward to fill
    Span *spans;      // [max_rows]
    int n_wanted, n_spans;
    Scratch *scratch;             // [n_threads]
    atomic_int arrived, meetings; // of the threads in a forward: how many wait now, how often all have met
    uint32_t *cache;              // [n_seqs, n_layers, n_kv_heads, keys then values]
} Session;

// 4-byte words of n elements of a key or value. int8: the elements, then a scale for each block of them.
static size_t element_words(size_t n, Type type) {
    return type == I8 ? pad(n, 4) / 4 + pad(n, BLOCK) / BLOCK : n / (size_t)step_columns(type);
}

// Bytes that a token takes in the cache of all layers.
static size_t cache_token_bytes(const Config *c, Type type) {
    size_t hd = (size_t)c->head_dim, words = element_words(hd, type) + element_words(pad(hd, PANEL), type);
    return words * 4 * (size_t)c->n_layers * (size_t)c->n_kv_heads;
}

// How many positions the cache of a sequence has to hold, in whole blocks where it is a ring: then the positions of a
// block lie together in it.
static int cache_slots(const Config *c, int n_ctx, int max_rows) {
    size_t all = pad((size_t)n_ctx, PANEL), ring = pad((size_t)c->sliding_window + (size_t)max_rows, ATTENTION_BLOCK);
    return (int)(c->sliding_window && ring < all ? ring : all);
}

// Words of the keys and values of one kv head, and of everything.
static size_t head_words(const Session *s) { return (size_t)s->n_slots * (s->key_words + s->value_words); }
static size_t cache_words(const Session *s) {
    const Config *c = &s->model->config;
    size_t heads = (size_t)s->n_seqs * (size_t)c->n_layers * (size_t)c->n_kv_heads; // fits, by config_check
    return product(heads, head_words(s), "key/value cache");
}

// Where the keys, and the values, of a kv head begin.
static uint32_t *cache_keys(const Session *s, int seq, int layer, int kv_head) {
    const Config *c = &s->model->config;
    size_t head = ((size_t)seq * (size_t)c->n_layers + (size_t)layer) * (size_t)c->n_kv_heads + (size_t)kv_head;
    return s->cache + head * head_words(s);
}

static uint32_t *cache_values(const Session *s, int seq, int layer, int kv_head) {
    return cache_keys(s, seq, layer, kv_head) + (size_t)s->n_slots * s->key_words;
}

// A row takes the slot of its position, and in a ring that of an older one. A sequence begins anew at position 0, and
// has lost nothing yet.
static void cache_claim(Session *s, const Row *row) {
    int *lost = &s->lost[row->seq];
    *lost = row->pos ? max_int(*lost, row->pos + 1 - s->n_slots) : 0;
}

// Whether the cache still holds what a row at `pos` may see, where all positions before it have been computed.
static bool cache_reaches(const Session *s, int seq, int pos) {
    return s->lost[seq] <= 0 || pos - s->model->config.sliding_window + 1 >= s->lost[seq];
}

// Copy what n positions of a sequence have in the cache to another sequence.
static void cache_copy(const Session *s, int from, int to, int n) {
    const Config *c = &s->model->config;
    size_t slots = pad((size_t)min_int(n, s->n_slots), PANEL);
    s->lost[to] = s->lost[from];
    for (int l = 0; l < c->n_layers; l++)
        for (int h = 0; h < c->n_kv_heads; h++) {
            memcpy(cache_keys(s, to, l, h), cache_keys(s, from, l, h), slots * s->key_words * 4);
            memcpy(cache_values(s, to, l, h), cache_values(s, from, l, h), slots * s->value_words * 4);
        }
}

// int8 keys of n positions as f32 panels. keys: n / 16 panels, each of words of 4 int8 and then the scales.
static void unpack_keys(float *out, const uint32_t *keys, int n, int head_dim, ptrdiff_t ahead) {
    const int words = (head_dim + 3) / 4, blocks = (head_dim + BLOCK - 1) / BLOCK;
    for (int t = 0; t < n; t += PANEL, keys += (size_t)(words + blocks) * PANEL)
        for (int i = 0; i < head_dim; i++, out += PANEL) {
            const uint32_t *word = keys + (size_t)(i / 4) * PANEL, *scale = keys + (size_t)(words + i / BLOCK) * PANEL;
            __builtin_prefetch(word + ahead);
            for (int j = 0; j < PANEL; j++)
                out[j] = float_from_bits(scale[j]) * (float)((int32_t)(word[j] << (24 - 8 * (i % 4))) >> 24);
        }
}

// int8 values of n positions as floats. values: for each position v_stride / 4 words of 4 int8, then its scales.
static void unpack_values(float *out, const uint32_t *values, int n, int v_stride, ptrdiff_t ahead) {
    const int words = v_stride / 4, blocks = (v_stride + BLOCK - 1) / BLOCK;
    for (int t = 0; t < n; t++, values += words + blocks, out += v_stride) {
        const int8_t *q = (const int8_t *)values;
        __builtin_prefetch(values + ahead);
        for (int i = 0; i < v_stride; i += PANEL) {
            float scale = float_from_bits(values[words + i / BLOCK]);
            for (int j = 0; j < PANEL; j++) out[i + j] = scale * (float)q[i + j];
        }
    }
}

// The keys of n positions of a kv head from slot t (a multiple of 16) on, as a matrix for §4. ahead: words to what
// will be wanted next.
static FloatPanels key_panels(const Session *s, const uint32_t *keys, int t, int n, ptrdiff_t ahead, float *unpacked) {
    int hd = s->model->config.head_dim;
    keys += (size_t)t * s->key_words;
    if (s->kv_type != I8) return (FloatPanels){s->kv_type, keys, PANEL, s->key_words * PANEL, hd, ahead};
    unpack_keys(unpacked, keys, n, hd, ahead);
    return (FloatPanels){F32, (const uint32_t *)unpacked, PANEL, (size_t)hd * PANEL, hd, 0};
}

// And the values.
static FloatPanels value_panels(const Session *s, const uint32_t *values, int t, int n, ptrdiff_t ahead,
                                float *unpacked) {
    values += (size_t)t * s->value_words;
    if (s->kv_type != I8) return (FloatPanels){s->kv_type, values, s->v_stride, PANEL, n, ahead};
    unpack_values(unpacked, values, n, (int)s->v_stride, ahead);
    return (FloatPanels){F32, (const uint32_t *)unpacked, s->v_stride, PANEL, n, 0};
}

// One block of a key or value, n <= BLOCK floats, as the words that the cache has of it. Returns how many these are.
// f16: what is beyond the largest half, 65504, becomes that. int8: and the scale, as bits.
static int encode_block(Type type, const float *x, int n, uint32_t words[BLOCK], uint32_t *scale) {
    float block[BLOCK] = {0}, float_scale, sum[N_SUMS];
    int32_t q[BLOCK / 4], minus[N_SUMS];
    memcpy(block, x, (size_t)n * sizeof *x);
    if (type == F32) memcpy(words, block, sizeof block);
    if (type == F16) {
        for (int i = 0; i < BLOCK; i++) block[i] = block[i] > 65504 ? 65504 : block[i] < -65504 ? -65504 : block[i];
        for (int i = 0; i < BLOCK; i += LANES) floats_store_f16((uint16_t *)words + i, floats_load(block + i));
    }
    if (type == I8) {
        quantize_block(block, 1, q, &float_scale, minus, sum);
        memcpy(words, q, sizeof q);
        *scale = bits_of_float(float_scale);
    }
    return (n + step_columns(type) - 1) / step_columns(type);
}

// Put the key and value of one kv head at a position. k, v: [head_dim]
static void cache_store(const Session *s, int layer, int kv_head, const Row *row, const float *k, const float *v) {
    const int hd = s->model->config.head_dim;
    size_t t = (size_t)(row->pos % s->n_slots);
    uint32_t *keys = cache_keys(s, row->seq, layer, kv_head) + t / PANEL * PANEL * s->key_words + t % PANEL;
    uint32_t *values = cache_values(s, row->seq, layer, kv_head) + t * s->value_words;
    uint16_t *halves = (uint16_t *)(values - t % 2 * s->value_words) + t % 2; // of two positions, in turn
    uint32_t *key_scales = keys + pad((size_t)hd, 4) / 4 * PANEL, *value_scales = values + s->v_stride / 4;
    for (int i = 0; i < hd; i += BLOCK) {
        uint32_t words[BLOCK], scale = 0;
        int n = min_int(BLOCK, hd - i), n_words = encode_block(s->kv_type, k + i, n, words, &scale);
        for (int j = 0; j < n_words; j++, keys += PANEL) *keys = words[j];
        if (s->kv_type == I8) key_scales[i / BLOCK * PANEL] = scale;
        encode_block(s->kv_type, v + i, n, words, &scale);
        if (s->kv_type == F16)
            for (int j = 0; j < n; j++, halves += 2) *halves = ((const uint16_t *)words)[j];
        else
            for (int j = 0; j < n_words; j++) *values++ = words[j];
        if (s->kv_type == I8) value_scales[i / BLOCK] = scale;
    }
}

// Room for n rows of up to `cols` activations, in the forms that the model's matrices want.
static Activations activations_open(const Model *m, int n, int cols) {
    Activations x = {.stride = pad((size_t)cols, BLOCK)};
    size_t whole = pad((size_t)n, STRIP), blocks = whole * x.stride / BLOCK;
    x.f = alloc((size_t)n * x.stride, sizeof *x.f, "activations");
    if (m->any_bf16) x.pairs = alloc((size_t)n * x.stride / 2, sizeof *x.pairs, "activations");
    if (!m->any_quantized) return x;
    x.q = alloc(blocks * BLOCK / 4, sizeof *x.q, "activations");
    x.scale = alloc(blocks, sizeof *x.scale, "activations");
    x.sum = alloc(blocks * N_SUMS, sizeof *x.sum, "activations");
    x.minus = alloc(blocks * N_SUMS, sizeof *x.minus, "activations");
    return x;
}

static void activations_free(Activations *x) {
    void *all[] = {x->f, x->pairs, x->q, x->scale, x->sum, x->minus};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
}

// A thread's Scratch, in one allocation.
static Scratch scratch_open(const Session *s) {
    const Config *c = &s->model->config;
    const size_t n = (size_t)(s->span_rows * (c->n_heads / c->n_kv_heads)), hd = (size_t)c->head_dim;
    size_t unpacked = s->kv_type == I8 ? ATTENTION_BLOCK * s->v_stride : 0;
    Scratch t;
    t.scores = alloc(n * (ATTENTION_BLOCK + 2 * s->v_stride + hd + 3) + unpacked, sizeof(float), "attention");
    t.unpacked = t.scores + n * ATTENTION_BLOCK; // all up to q are multiples of 16 floats: they lie on cache lines
    t.part = t.unpacked + unpacked;
    t.out = t.part + n * s->v_stride;
    t.q = t.out + n * s->v_stride;
    t.softmax = (Softmax *)(t.q + n * hd);
    return t;
}

// Room for n_seqs sequences of n_ctx positions, forward calls of up to max_rows rows of which max_logits want logits.
static Session *session_open(const Model *m, Type kv_type, int n_ctx, int n_seqs, int max_rows, int max_logits,
                             int n_threads) {
    const Config *c = &m->config;
    Session *s = alloc(1, sizeof *s, "session");
    *s = (Session){.model = m, .n_ctx = n_ctx, .n_seqs = n_seqs, .max_rows = max_rows, .max_logits = max_logits};
    s->n_threads = n_threads;
    s->kv_type = kv_type;
    s->n_slots = cache_slots(c, n_ctx, max_rows);
    s->span_rows = max_int(1, ATTENTION_QUERIES / (c->n_heads / c->n_kv_heads));
    s->v_stride = pad((size_t)c->head_dim, PANEL);
    s->key_words = element_words((size_t)c->head_dim, kv_type);
    s->value_words = element_words(s->v_stride, kv_type);
    s->dim_stride = pad((size_t)c->dim, PANEL);
    s->q_stride = pad((size_t)q_dim(c), PANEL);
    s->kv_stride = pad((size_t)kv_dim(c), PANEL);
    s->hidden_stride = pad((size_t)c->hidden_dim, PANEL);
    s->vocab_stride = pad((size_t)c->vocab_size, PANEL);
    const struct {
        float **array;
        size_t width;
    } floats[] = {{&s->x, s->dim_stride}, {&s->branch, s->dim_stride},  {&s->q, s->q_stride},
                  {&s->k, s->kv_stride},  {&s->gate, s->hidden_stride}, {&s->turns, (size_t)c->head_dim},
                  {&s->v, s->kv_stride},  {&s->up, s->hidden_stride}};
    for (size_t i = 0; i < sizeof floats / sizeof *floats; i++)
        *floats[i].array = alloc((size_t)max_rows * floats[i].width, sizeof(float), "activations");
    s->in = activations_open(m, max_rows, max_int(max_int(c->dim, c->hidden_dim), q_dim(c)));
    s->lost = alloc((size_t)n_seqs, sizeof *s->lost, "session");
    s->logits = alloc(product((size_t)max_logits, s->vocab_stride, "logits"), sizeof(float), "logits");
    s->wanted = alloc((size_t)max_logits, sizeof *s->wanted, "session");
    s->rows = alloc((size_t)max_rows, sizeof *s->rows, "session");
    s->spans = alloc((size_t)max_rows, sizeof *s->spans, "session");
    s->scratch = alloc((size_t)n_threads, sizeof *s->scratch, "session");
    for (int i = 0; i < n_threads; i++) s->scratch[i] = scratch_open(s);
    s->cache = alloc_pages(cache_words(s), sizeof(uint32_t),
                           "the key/value cache (a smaller --context or --batch takes less)");
    return s;
}

static void session_free(Session *s) {
    void *all[] = {s->lost, s->x,     s->q,      s->k,      s->v,    s->branch, s->gate,
                   s->up,   s->turns, s->logits, s->wanted, s->rows, s->spans,  s->scratch};
    for (int i = 0; i < s->n_threads; i++) free(s->scratch[i].scores);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    activations_free(&s->in);
    free_pages(s->cache, cache_words(s), sizeof(uint32_t));
    free(s);
}

// Where the threads of a forward wait for each other: until all are here, what one of them has written is not for the
// others to read. Hundreds of these make a token, so waiting means looking again at once; but if that takes long,
// another program probably has the processor of the one that is late, and this thread offers its own.
static void meet(Session *s) {
    enum { PATIENCE = 4000 };
    int n = omp_get_num_threads(), meeting = atomic_load_explicit(&s->meetings, memory_order_relaxed);
    if (n == 1) return;
    if (atomic_fetch_add_explicit(&s->arrived, 1, memory_order_acq_rel) == n - 1) {
        atomic_store_explicit(&s->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&s->meetings, meeting + 1, memory_order_release);
        return;
    }
    for (int looks = 0; atomic_load_explicit(&s->meetings, memory_order_acquire) == meeting; looks++)
        if (looks > PATIENCE) sched_yield();
}

// ---------------------------------------------------------------------------------------------------------------------
// §7 Forward
//
// The transformer: rows in, logits out. Decoding is a call with one row; reading a prompt, one with many rows of a
// sequence; a batch, one row of each sequence. Only attention looks at where and whose a row is. Each function below
// is called by all threads of one parallel region. They share its loops with `omp for` and meet before one reads what
// another has written.

// x = the embedding of each row's token; and what else depends only on the row.
static void embed(Session *s, const Row *rows, int n) {
    const Model *m = s->model;
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) {
        matrix_row(s->x + (size_t)r * s->dim_stride, &m->embed, rows[r].token);
        rope_turns(s->turns + (size_t)r * (size_t)m->config.head_dim, m, rows[r].pos);
    }
    meet(s);
}

// Row r of in = rmsnorm(row r of x), or of row from[r] where `from` is not NULL, r < n
static void norm_rows(Session *s, const float *weight, const int *from, int n) {
    const Config *c = &s->model->config;
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) {
        const float *x = s->x + (size_t)(from ? from[r] : r) * s->dim_stride;
        rmsnorm(s->in.f + (size_t)r * s->in.stride, x, weight, c->dim, c->norm_eps);
        prepare_row(&s->in, r, c->dim);
    }
    meet(s);
}

// x += bias. x: [n]; bias: [n], or NULL where the model has none
static void add_bias(float *x, const float *bias, int n) {
    for (int i = 0; bias && i < n; i++) x[i] += bias[i];
}

// x += branch + bias, the residual connection. bias: [dim] or NULL
static void add_branch(Session *s, const float *bias, int n) {
#pragma omp for schedule(static) nowait // norm_rows gives the same rows to the same threads
    for (int r = 0; r < n; r++) {
        float *x = s->x + (size_t)r * s->dim_stride, *branch = s->branch + (size_t)r * s->dim_stride;
        add_bias(branch, bias, s->model->config.dim);
        for (size_t i = 0; i < s->dim_stride; i++) x[i] += branch[i];
    }
}

// One head's query or key: norm where the model has one, then RoPE. x, norm: [head_dim]
static void finish_head(const Config *c, float *x, const float *norm, const float *turns) {
    if (norm) rmsnorm(x, x, norm, c->head_dim, c->norm_eps);
    rope(x, turns, c->head_dim);
}

// Bias, norm and RoPE for the queries and keys of each row; keys and values into the cache.
static void rotate_and_store(Session *s, int layer, const Row *rows, int n) {
    const Config *c = &s->model->config;
    const Layer *w = &s->model->layers[layer]; // its weights
    int hd = c->head_dim;
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) {
        size_t row = (size_t)r;
        float *q = s->q + row * s->q_stride, *k = s->k + row * s->kv_stride, *v = s->v + row * s->kv_stride;
        const float *turns = s->turns + row * (size_t)hd;
        add_bias(q, w->q_bias, q_dim(c));
        add_bias(k, w->k_bias, kv_dim(c));
        add_bias(v, w->v_bias, kv_dim(c));
        for (int h = 0; h < c->n_heads; h++) finish_head(c, q + h * hd, w->q_norm, turns);
        for (int h = 0; h < c->n_kv_heads; h++) {
            finish_head(c, k + h * hd, w->k_norm, turns);
            cache_store(s, layer, h, &rows[r], k + h * hd, v + h * hd);
        }
    }
    meet(s);
}

// The online softmax of one query over one block of n scores (a multiple of 16), of which [from, to) are visible. Turns
// scores into weights e^(score - max); where the block raises the maximum, what was summed before shrinks by `rescale`.
// Ref: Milakov & Gimelshein 2018, alg. 3.
static void softmax_block(float *scores, int n, int from, int to, Softmax *s) {
    for (int t = 0; t < n; t++)
        if (t < from || t >= to) scores[t] = -INFINITY;
    float block_max = maximum(scores, n), max = block_max > s->max ? block_max : s->max;
    s->rescale = from < to ? exp_f32(s->max - max) : 1;
    s->sum = fma1(s->sum, s->rescale, exp_and_sum(scores, n, from < to ? max : 0));
    s->max = max;
}

// Task i of attention: the queries of span i / n_kv_heads that share kv head i % n_kv_heads. Its keys:
static const uint32_t *task_keys(const Session *s, int layer, const Row *rows, int task) {
    int n_kv_heads = s->model->config.n_kv_heads;
    return cache_keys(s, rows[s->spans[task / n_kv_heads].first].seq, layer, task % n_kv_heads);
}

// Words from the cache of a task to that of the next one that this thread is likely to get. While it attends, it asks
// for what lies there: short runs in many places are what memory is slow at.
static ptrdiff_t task_distance(const Session *s, int layer, const Row *rows, int task) {
    int next = task + omp_get_num_threads();
    bool last = next >= s->n_spans * s->model->config.n_kv_heads;
    return last ? 0 : task_keys(s, layer, rows, next) - task_keys(s, layer, rows, task);
}

// Attention of the queries of one span that share a kv head:
//     out = softmax(q . k^T / sqrt(head_dim)) . v     over the positions that the query's row may see
// Ref: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 for the sharing. Blocks of positions in which no query of the
// span sees anything are skipped; a position that one query may not see gets weight 0 there, which changes nothing (as
// long as its value is a finite number; else the model is broken, and its logits will say so).
static void attend(const Session *s, Scratch *t, int layer, const Row *rows, int task) {
    const Config *c = &s->model->config;
    const Span span = s->spans[task / c->n_kv_heads];
    const int kv_head = task % c->n_kv_heads, group = c->n_heads / c->n_kv_heads, n_queries = span.count * group;
    const int seq = rows[span.first].seq, first = rows[span.first].pos, end = first + span.count;
    const int window = c->sliding_window ? min_int(c->sliding_window, s->n_ctx) : s->n_ctx; // positions that a row sees
    const size_t hd = (size_t)c->head_dim;
    const uint32_t *keys = task_keys(s, layer, rows, task), *values = cache_values(s, seq, layer, kv_head);
    ptrdiff_t next = task_distance(s, layer, rows, task);
    float scale = 1.0f / sqrtf((float)hd);
    for (int i = 0; i < n_queries; i++) { // query i: row i / group of the span, head i % group of the kv head
        size_t row = (size_t)(span.first + i / group), head = (size_t)(kv_head * group + i % group);
        const float *q = s->q + row * s->q_stride + head * hd;
        for (size_t j = 0; j < hd; j++) t->q[(size_t)i * hd + j] = q[j] * scale;
        t->softmax[i] = (Softmax){-INFINITY, 0, 1};
    }
    memset(t->out, 0, (size_t)n_queries * s->v_stride * sizeof(float));
    int oldest = max_int(0, first - window + 1);
    for (int b = oldest / ATTENTION_BLOCK * ATTENTION_BLOCK; b < end; b += ATTENTION_BLOCK) {
        int n = min_int(ATTENTION_BLOCK, end - b), padded = (int)pad((size_t)n, PANEL), slot = b % s->n_slots;
        bool last = b + ATTENTION_BLOCK >= end;
        FloatPanels k = key_panels(s, keys, slot, padded, last ? next : AHEAD * PANEL, t->unpacked);
        multiply_float(padded / PANEL, n_queries, k, t->q, hd, t->scores, ATTENTION_BLOCK);
        for (int i = 0; i < n_queries; i++) {
            int pos = first + i / group, from = max_int(pos - window + 1 - b, 0), to = min_int(pos + 1 - b, n);
            softmax_block(t->scores + (size_t)i * ATTENTION_BLOCK, padded, from, to, &t->softmax[i]);
        }
        ptrdiff_t ahead = last ? next : AHEAD * (ptrdiff_t)s->v_stride;
        FloatPanels v = value_panels(s, values, slot, n, ahead, t->unpacked);
        multiply_float((int)s->v_stride / PANEL, n_queries, v, t->scores, ATTENTION_BLOCK, t->part, s->v_stride);
        for (int i = 0; i < n_queries; i++)
            for (size_t j = (size_t)i * s->v_stride; j < (size_t)(i + 1) * s->v_stride; j++)
                t->out[j] = fma1(t->out[j], t->softmax[i].rescale, t->part[j]);
    }
    for (int i = 0; i < n_queries; i++) {
        size_t row = (size_t)(span.first + i / group), head = (size_t)(kv_head * group + i % group);
        float *out = s->in.f + row * s->in.stride + head * hd;
        for (size_t j = 0; j < hd; j++) out[j] = t->out[(size_t)i * s->v_stride + j] / t->softmax[i].sum;
    }
}

// x += Wo attention(Wq norm(x), Wk norm(x), Wv norm(x))
static void attention(Session *s, int layer, const Row *rows, int n) {
    const Layer *w = &s->model->layers[layer]; // its weights
    norm_rows(s, w->attn_norm, NULL, n);
    matmul(s->q, s->q_stride, &s->in, n, &w->q);
    matmul(s->k, s->kv_stride, &s->in, n, &w->k);
    matmul(s->v, s->kv_stride, &s->in, n, &w->v);
    meet(s);
    rotate_and_store(s, layer, rows, n);
#pragma omp for schedule(dynamic) nowait
    for (int i = 0; i < s->n_spans * s->model->config.n_kv_heads; i++)
        attend(s, &s->scratch[omp_get_thread_num()], layer, rows, i);
    meet(s);
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) prepare_row(&s->in, r, q_dim(&s->model->config));
    meet(s);
    matmul(s->branch, s->dim_stride, &s->in, n, &w->o);
    meet(s);
    add_branch(s, w->o_bias, n);
}

// x += Wdown (silu(Wgate norm(x)) * Wup norm(x))
static void feed_forward(Session *s, int layer, int n) {
    const Layer *w = &s->model->layers[layer]; // its weights
    const Config *c = &s->model->config;
    norm_rows(s, w->ffn_norm, NULL, n);
    matmul(s->gate, s->hidden_stride, &s->in, n, &w->gate);
    matmul(s->up, s->hidden_stride, &s->in, n, &w->up);
    meet(s);
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) {
        size_t at = (size_t)r * s->hidden_stride;
        swiglu(s->in.f + (size_t)r * s->in.stride, s->gate + at, s->up + at, c->hidden_dim);
        prepare_row(&s->in, r, c->hidden_dim);
    }
    meet(s);
    matmul(s->branch, s->dim_stride, &s->in, n, &w->down);
    meet(s);
    add_branch(s, NULL, n);
}

// logits = Woutput norm(x), for the rows that want them, in their order
static void classify(Session *s) {
    const Model *m = s->model;
    meet(s); // a wanted row may have been another thread's
    norm_rows(s, m->final_norm, s->wanted, s->n_wanted);
    matmul(s->logits, s->vocab_stride, &s->in, s->n_wanted, &m->output);
}

// Which rows want logits, and which neighbours are one span: same sequence, ascending positions. Each claims its slot.
static void plan_rows(Session *s, const Row *rows, int n) {
    s->n_wanted = s->n_spans = 0;
    s->in.strip = n == 1 ? 1 : STRIP;
    assert(n <= s->max_rows);
    for (int r = 0; r < n; r++) {
        assert(rows[r].token >= 0 && rows[r].token < s->model->config.vocab_size);
        assert(rows[r].pos >= 0 && rows[r].pos < s->n_ctx && rows[r].seq >= 0 && rows[r].seq < s->n_seqs);
        assert(!rows[r].want_logits || s->n_wanted < s->max_logits);
        if (rows[r].want_logits) s->wanted[s->n_wanted++] = r;
        cache_claim(s, &rows[r]);
        bool joins = r > 0 && rows[r].seq == rows[r - 1].seq && rows[r].pos == rows[r - 1].pos + 1;
        if (!joins || s->spans[s->n_spans - 1].count == s->span_rows) s->spans[s->n_spans++] = (Span){r, 0};
        s->spans[s->n_spans - 1].count++;
    }
}

// The whole network. rows: n <= max_rows of any sequences, at most max_logits of them wanting logits; the positions
// before a row's own must be in the cache or in this call. logits[i] then belongs to the i-th row that wants them.
static void forward(Session *s, const Row *rows, int n) {
    plan_rows(s, rows, n);
#pragma omp parallel num_threads(s->n_threads)
    {
        embed(s, rows, n);
        for (int l = 0; l < s->model->config.n_layers; l++) {
            attention(s, l, rows, n);
            feed_forward(s, l, n);
        }
        classify(s);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §8 Words
//
// Text as characters: the classes of Unicode, and the patterns by which byte-level vocabularies (§9) cut a text into
// words before anything is merged.

// --- characters

// The classes of all Unicode characters, as runs: a letter for the class, and how many code points if more than one.
//     U upper and title case   L lower case   O other letters   M marks   N numbers   P punctuation   S space   - else
// Written by `export.py --unicode-classes` from Unicode 14.0.0.
static const char unicode_runs[] =
    "-9S5-18SP3-P6-P4N10P2-3P2U26P3-P-L26P-P-7S-26SP-5P-2OP-6N2-LP2-NOPN3PU23-U7L24-L8ULULULULULULULULULULULULULULULUL"
    "ULULULULULULULULULULULUL2ULULULULULULULUL2ULULULULULULULULULULULULULULULULULULULULULULULU2LULUL3U2LULU2LU3L2U4LU2"
    "LU3L3U2LU2LULULU2LUL2ULU2LU3LULU2L2OUL3O4U2LU2LU2LULULULULULULULUL2ULULULULULULULULUL2U2LULU3LULULULULULULULULULU"
    "LULULULULULULULULULULULULULULULULULULUL7U2LU2L2ULU4LULULULUL69OL27O18-4O12-14O5-7O-O-17M112ULULO-UL-2OL3PU-6UPU3-"
    "U-U2LU17-U9L35UL2U3L3ULULULULULULULULULULULUL5UL-ULU2L2U51L48ULULULULULULULULULULULULULULULULUL-M7ULULULULULULULU"
    "LULULULULULULULULULULULULULULULULULULULU2LULULULULULUL2ULULULULULULULULULULULULULULULULULULULULULULULULULULULULUL"
    "ULULULULULULULULULULULULULULULULULULUL-U38-2OP6L41P2-6M45PMPM2PM2PM-8O27-4O4P2-20P2-P2-2M11P-P3O43M21N10P4O2MO99P"
    "OM7-2M6O2M2-M4O2N10O3-2OP14-2OMO30M27-2O89M11O-14N10O33M9O2-P3O-2M-2O22M4OM9OM3OM5-2P15-O25M3-2P-O11-5O24-O6-9M8"
    "O42M24-M33O54M3OM18OM7O10M2P2N10PO16M3-O8-2O2-2O22-O7-O-3O4-2MOM7-2M2-2M3O-8M-4O2-O3M2-2N10O2-2N6-2OPM-2M3-O6-4O2"
    "-2O22-O7-O2-O2-O2-2M-M5-4M2-2M3-3M-7O4-O-7N10M2O3MP-10M3-O9-O3-O22-O7-O2-O5-2MOM8-M3-M3-2O-15O2M2-2N10P-8OM6-M3-"
    "O8-2O2-2O22-O7-O2-O5-2MOM7-2M2-2M3-7M3-4O2-O3M2-2N10-ON6-10MO-O6-3O3-O4-3O2-O-O2-3O2-3O3-3O12-4M5-3M3-M4-2O-6M-14"
    "N13-13M5O8-O3-O23-O16-2MOM7-M3-M4-7M2-O3-2O-2O2M2-2N10-7PN7-OM3PO8-O3-O23-O10-O5-2MOM7-M3-M4-7M2-6O2-O2M2-2N10-O2"
    "-13M4O9-O3-O41M2OM7-M3-M4O-5O3MN7O3M2-2N19-O6-M3-O18-3O24-O9-O-2O7-3M-4M6-M-M8-6N10-2M2P-12O48MO2M7-5O7M8PN10P2"
    "-37O2-O-O5-O24-O-O10MO2M9O-2O5-O-M6-2N10-2O4-32O-3P15-P-3M2-6N20-M-M-MP4M2O8-O36-4M20PM2O5M11-M36-9M-9P5-4P2-37"
    "O43M20ON10P6O6M4O4M3OM3O2M7O3M4O13M12OMN10M4-2U38-U-5U-2L43POL3O329-O4-2O7-O-O4-2O41-O4-2O33-O4-2O7-O-O4-2O15-O57"
    "-O4-2O67-2M3P9N20-3O16-16U86-2L6-2PO620-PO17SO26P2-3O75P3N3O8-7O18M4-9O19M3P2-9O18M2-12O13-O3-M2-12O52M32P3OP3-OM"
    "-2N10-6N10-6P11M3-MN10-6O89-7O5M2O34MO-5O70-10O31-M12-4M12-8P2N10O30-2O5-11O44-4O26-6N11-37O23M5-2P2O53M10-M29-2M"
    "N10-6N10-6P7OP6-2M31-49M5O47M17O8-3N10P7-10M9-9P2-M3O30M13O2N10O44M14-8P4O36M20-3P5N10-3O3N10O36P2L9-7U43-2U3P8-8"
    "M3PM21O4MO6MO2M3O-5L44O63L13OL34O37M64ULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULU"
    "LULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULUL9ULULULULULULULULULULULULULULULULULULU"
    "LULULULULULULULULULULULULULULULULULULULULULULULULULULULULULUL9U8L6-2U6-2L8U8L8U8L6-2U6-2L8-U-U-U-UL8U8L14-2L8U8L8"
    "U8L8U8L5-L2U5-L-3L3-L2U5-3L4-2L2U4-4L8U5-5L3-L2U5-3S11-5P24S2-5SP20-P13-P12S-16NO-2N6-3P2ON10-3P2-O13-51M33-17U-4"
    "U-2LU3L2U3L-U-3U5-6U-U-U-U4-LU4LO4L-2L2U2-5UL4-4L-N51ULN5-382P4-29P2-309N60-78N22-616P14N30-49P2-31P10-403P22-63"
    "P4-32P2-514U48L48ULU3L2ULULULU4LUL2UL6O2U3LULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULUL"
    "ULULULULULULULULULULULULULUL2-6ULULM3UL-5P4NP2L38-L-5L-2O56-7OP-14MO23-9O7-O7-O7-O7-O7-O7-O7-O7-M32P47OP32-2P12"
    "-418SP3-O2NP10-2P12-N9M6PO5-2N3O2P-3O86-2M2-2O3PO90PO4-5O43-O94-3N4-10O32-48O16-32N10-30N8-N15-32N10-39N15-320"
    "O6592-64O22157-67O46P2O269P3O16N10O2-20ULULULULULULULULULULULULULULULULULULULULULULULOM4PM10POULULULULULULULULULU"
    "LULULULULO2M2O70N10M2P6-31O9-2ULULULULULULUL3ULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULULOL8ULU"
    "LU2LULULULULO-2ULULOULUL3ULULULULULULULULULULU5LU5LULULULULULULULU4LUL-5UL-L-LULUL-24O3ULO3LO7MO3MO4MO23M5-4M-3N6"
    "-10O52P4-8M2O50M18-8P2N10-6M18O6P3OPO2MN10O28M8P2O23M13-11PO29-3M4O47M14P13-ON10-4P2O5MO10N10O5-O41M14-9O3MO8M2-2"
    "N10-2P4O23-3OM3O50MOM3O2M2O5M2OMO-24O3P2O11M5P2O3M2-10O6-2O6-2O6-9O7-O7-L43-O4L9O-6L80O35M8PM2-2N10-6O11172-12O23"
    "-4O49-8452O366-2O106-38L7-12L5-5OMO10-O13-O5-O-O2-O2-O108-33O363P2-16O64-2O54-40O12-4M16P10-6M16P35-P14-P-4P-P2-4"
    "O5-O135-4P3-P6-P4N10P2-3P2U26P3-P-L26P-P-P7O89-3O6-2O6-2O6-2O3-35O12-O26-O19-O2-O15-2O14-34O123-5P3-4N45-12N57-17"
    "N2-113M-130O29-3O49-15MN27-4O32N4-9O20NO8N-5O38M5-5O30-PO36-4O8PN5-42U40L40O78-2N10-6U36-4L36-4O40-8O52-11PU11-"
    "U15-U7-U2-L11-L15-L7-L2-67O311-9O22-10O8-24O6-O42-O9-69O6-2O-O44-O2-3O-2O23-PN8O23-2N7O31-8N9-48O19-O2-5N5O22N6-3"
    "PO26-5P-64O56-4N2O2N16-2N46OM3-M2-5M4O4-O3-O29-2M3-4MN9-7P9-7O29N2PO29N3-32O8-O28M2-4N5P7-9O54-3P7O22-2N8O19-5N8"
    "O18-7P4-12N7-80O73-55U51-13L51-7N6O36M4-8N10-294N31-O42-M2P-2O2-78O29N10O-8O22M11N4P5-22O18M4P4-38O21N7-20O23-9M3"
    "O53M15P7-4N30MO2M2O-9M4O45M11P2-P4M-13O25-7N10-6M3O36M14-N10P4OM2O-8O35MP2O-9M3O48M14O4P4M4PM2N10OPOP3-N20-11O18-"
    "O25M12P6M-65O7-O-O4-O15-O10P-6O47M12-5N10-6M4-O8-2O2-2O22-O7-O2-O5-M2OM7-2M2-2M3-2O-6M-5O5M2-2M7-3M5-139O53M18O4"
    "P5N10P2-PMO3-30O48M20O2PO-8N10-166O47M7-2M9P23O4M2-34O48M17P3O-11N10-6P13-19O43M13OP-6N10-54O27-2M15-4N12P3-O7"
    "-185O44M15P-100U32L32N19-12O8-2O-2O8-O2-O24M6-M2-2M4OMOM2P3-9N10-70O8-2O39M7-2M7OPOM-27OM10O40M7OM4P8M-8OM11O46"
    "M16P3OP5-13O73-263O9-O37M8-M8OP5-10N29-3P2O30-2M22-M14-73O7-O2-O38M6-3M-M2-M7OM-8N10-6O6-O2-O32M5-M2-M5O-7N10-310"
    "O19M4P2-183O-15N21-42PO922-102N111-P5-11O196-2636O97P2-13O1071-4049O583-8633O569-7O31-N10-4P2O79-N10-6O30-2M5P-10"
    "O48M7P5-4O4P-11N10-N7-O21-5O19-688U32L32N23P4-101O75-4MOM55-7M4O13-64O2POM-11M2-14O6136-8O1238-42O9-8935O4-O7-O2-"
    "O291-45O3-17O4-8O396-2308O107-5O13-3O9-7O10-3M2P-4704M46-2M23-542M5-3M6-8M8-2M7-30M4-148M3-155N20-108N25-135U26"
    "L26U26L7-L18U26L26U-U2-2U-2U2-2U4-U8L4-L-L7-L11U26L26U2-U4-2U8-U7-L26U2-U4-U5-U-3U7-L26U26L26U26L26U26L26U26L26"
    "U26L26U26L28-2U25-L25-L6U25-L25-L6U25-L25-L6U25-L25-L6U25-L25-L6UL-2N50-512M55-4M50-8M-14M-2P5-15M5-M15-1104L10O"
    "L20-225M7-M17-2M7-M2-M5-213O45-3M7O7-2N10-4O-321O30M-17O44M4N10-1254O7-O4-O2-O15-O197-2N9M7-41U34L34M7O-4N10-4P2"
    "-785N59-N3-N4-76N45-N15-194O4-O27-O2-O-2O-O10-O4-O-O-6O-4O-O-O-O3-O2-O-2O-O-O-O-O-O2-O-2O4-O7-O4-O4-O-O10-O17-5O3"
    "-O5-O17-580N13-2787N10-1030O42720-32O4153-7O222-2O5762-14O7473-3103O542-1506O4939-716213M240-196112";

static char unicode_classes[0x110000]; // of each code point: unicode_runs, unfolded; constant from then on

static void unicode_prepare(void) {
    size_t start = 0, n;
    for (const char *p = unicode_runs; *p; start += n) {
        char class = *p++;
        n = isdigit((unsigned char)*p) ? strtoul(p, (char **)&p, 10) : 1;
        memset(unicode_classes + start, class, n);
    }
    assert(start == sizeof unicode_classes);
}

// --- the pre-tokenizers
//
// Each is a regular expression, tried at every character of the text: what it matches is a word, and so is what lies
// between two matches. Some vocabularies apply several, in stages. The pattern stands above the function that matches
// it; i is where the match begins, the function returns where it ends.

typedef enum { NO_STAGE, GPT2, ONE_NUMBER, NUMBERS, THREE_DIGITS, PUNCTUATION, LLAMA3, QWEN2, TEKKEN } Stage;

typedef struct {
    uint32_t code;
    int at; // offset in the text, in bytes
    char class;
} Char;

// A text as characters, *n_chars of them; after the last comes one more, of class 0, which no pattern matches.
static Char *chars_open(const char *text, size_t n, int *n_chars) {
    Char *c = alloc(n + 1, sizeof *c, "text");
    int count = 0;
    for (size_t i = 0; i < n; count++) {
        int len = utf8_scan(text + i, n - i);
        uint32_t code = len > 0 ? utf8_decode(text + i, len) : 0xFFFD; // a byte that is no character counts as a symbol
        c[count] = (Char){code, (int)i, unicode_classes[code]};
        i += (size_t)max_int(len, 1);
    }
    c[count].at = (int)n;
    *n_chars = count;
    return c;
}

static bool is_letter(char class) { return class == 'U' || class == 'L' || class == 'O'; }
static bool is_symbol(char class) { return class == 'M' || class == 'P' || class == '-'; } // [^\s\p{L}\p{N}]
static bool is_newline(uint32_t code) { return code == '\r' || code == '\n'; }

// The end of the run of characters from i on whose class is in `classes`, before `end`.
static int run_of(const Char *c, int i, int end, const char *classes) {
    while (i < end && strchr(classes, c[i].class)) i++;
    return i;
}

// 's|'t|'re|'ve|'m|'ll|'d at i: its end, or i. any_case: (?i: ...), where also U+017F is an s.
static int match_contraction(const Char *c, int i, int end, bool any_case) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (c[i].code != '\'') return i;
    for (int e = 0; e < 7; e++) {
        int len = (int)strlen(endings[e]), same = 0;
        while (same < len && i + 1 + same < end) {
            uint32_t code = c[i + 1 + same].code;
            if (any_case && code >= 'A' && code <= 'Z') code += 32;
            if (any_case && code == 0x17F) code = 's';
            if (code != (uint32_t)endings[e][same]) break;
            same++;
        }
        if (same == len) return i + 1 + len;
    }
    return i;
}

// \s+(?!\S)|\s+ at i: white space, but before a word its last character belongs to the word.
static int match_space(const Char *c, int i, int end) {
    int stop = run_of(c, i, end, "S");
    return stop < end && stop - i > 1 ? stop - 1 : stop;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static int match_gpt2(const Char *c, int i, int end) {
    int stop = match_contraction(c, i, end, false);
    if (stop > i) return stop;
    int word = i + (c[i].code == ' ');
    if (word < end && c[word].class != 'S') {
        const char *classes = is_letter(c[word].class) ? "ULO" : c[word].class == 'N' ? "N" : "MP-";
        return run_of(c, word, end, classes);
    }
    return match_space(c, i, end);
}

// [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*
static int match_cased_word(const Char *c, int i, int end) {
    int upper = run_of(c, i, end, "UOM"), lower = run_of(c, upper, end, "LOM");
    if (lower > upper) return lower;
    for (int last = upper; last > i; last--) // no small letter follows: up to the last that counts as either
        if (c[last - 1].class != 'U') return last;
    return upper;
}

// llama3:  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|
//          \s*[\r\n]+|\s+(?!\S)|\s+
// qwen2:   the same with \p{N} instead of \p{N}{1,3}
// tekken:  without the first, with match_cased_word for \p{L}+, \p{N}, and [\r\n/]* for [\r\n]*
static int match_modern(const Char *c, int i, int end, Stage stage) {
    int stop = stage == TEKKEN ? i : match_contraction(c, i, end, true);
    if (stop > i) return stop;
    bool leads = !is_letter(c[i].class) && c[i].class != 'N' && !is_newline(c[i].code);
    for (int word = i + leads; word >= i; word--) {
        stop = stage == TEKKEN ? match_cased_word(c, word, end) : run_of(c, word, end, "ULO");
        // tekken: a mark counts as a small letter itself, before it counts as what stands in front of capitals
        if (stage == TEKKEN && word > i && c[i].class == 'M' && run_of(c, word, end, "U") == stop) continue;
        if (stop > word) return stop;
    }
    if (c[i].class == 'N') return run_of(c, i, min_int(end, i + (stage == LLAMA3 ? 3 : 1)), "N");
    int symbols = i + (c[i].code == ' ' && i + 1 < end);
    if (is_symbol(c[symbols].class)) {
        stop = run_of(c, symbols, end, "MP-");
        while (stop < end && (is_newline(c[stop].code) || (stage == TEKKEN && c[stop].code == '/'))) stop++;
        return stop;
    }
    for (stop = run_of(c, i, end, "S"); stop > i; stop--)
        if (is_newline(c[stop - 1].code)) return stop;
    return match_space(c, i, end);
}

// Where the match of a stage's pattern at i ends; i: there is none. i < end.
static int match_stage(Stage stage, const Char *c, int i, int end) {
    int stop = i;
    switch (stage) {
    case GPT2: return match_gpt2(c, i, end);
    case ONE_NUMBER: return i + (c[i].class == 'N'); // \p{N}
    case NUMBERS: return run_of(c, i, end, "N");     // \p{N}+
    case THREE_DIGITS:                               // [0-9][0-9][0-9]
        while (stop < min_int(i + 3, end) && c[stop].code >= '0' && c[stop].code <= '9') stop++;
        return stop == i + 3 ? stop : i;
    case PUNCTUATION: // [\p{P}\$\+<=>\^~\|]+
        while (stop < end && (c[stop].class == 'P' || (c[stop].code < 128 && memchr("$+<=>^~|", (int)c[stop].code, 8))))
            stop++;
        return stop;
    default: return match_modern(c, i, end, stage);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §9 Tokenizer
//
// A model reads token ids. The vocabulary lists the piece of text of each id; byte-pair encoding (BPE) cuts a text into
// pieces: it starts from single characters and merges, again and again, the neighbouring pair that comes first in the
// vocabulary's order (leftmost among equals), until no pair merges. There are two families:
//
//   sentencepiece-style (Llama 1 and 2, Mistral): symbols are characters; two merge if the joined text is a piece, the
//       piece with the best score first. A space goes in front of the text. A character that is no piece falls back to
//       its UTF-8 bytes, for each of which there is a piece <0x00> ... <0xFF>.
//   byte-level (GPT-2, Llama 3, Qwen): symbols are bytes, so that nothing needs a fallback. A list of merges says which
//       pairs join, the earliest first. A pattern first cuts the text into words, which no merge crosses.
//
// Ref: Sennrich et al. 2016; Kudo & Richardson 2018; Radford et al. 2019.
//
// Rescanning the text for every merge takes time proportional to its square. Here the symbols form a linked list and
// the pairs that can merge wait in a heap: n log n.

// As in GGUF.
typedef enum { NORMAL_PIECE = 1, UNKNOWN_PIECE, CONTROL_PIECE, USER_PIECE, UNUSED_PIECE, BYTE_PIECE } PieceType;

typedef struct {
    const char *text; // not terminated
    int len;
    float score;
    PieceType type;
} Piece;

enum { MAX_STOP_IDS = 16, MAX_STAGES = 4 };

typedef struct {
    int left, right, rank; // left < 0: an empty slot
} Merge;

typedef struct {
    const char *path;
    char model[16], pre[32]; // "llama" or "gpt2", and the name of the pre-tokenizer
    int n_pieces;
    Piece *pieces;
    char *text;           // of all pieces
    int *hash;            // [hash_size] piece ids or -1, open addressing; only pieces that text may become
    uint32_t hash_size;   // a power of two
    Merge *merges;        // [merges_size], open addressing; only byte-level vocabularies have them
    uint32_t merges_size; // a power of two, or 0
    int *specials;        // ids of the user-defined and the control pieces
    int n_specials;
    int byte_ids[256];        // id of the piece of a byte, or -1
    int bos, unknown;         // ids, or -1
    bool add_bos;             // a text begins with BOS
    bool space_prefix;        // a space goes in front of a text
    bool single_prefix;       // but not in front of one that begins with a space
    bool escapes_space;       // U+2581 in a text counts as a space
    bool whole_words;         // a word that is a piece is not cut up, whatever the merges say
    Stage stages[MAX_STAGES]; // the words: each pattern cuts up what the one before it left, matched or not
    int stop_ids[MAX_STOP_IDS], n_stop_ids;
    char *chat_template; // or NULL
} Tokenizer;

// A hash table for n entries with open addressing: a power of two of slots, fewer than half of them ever taken. In an
// empty one all bits are set, so that an id in it is -1.
static void *hash_open(uint32_t *n_slots, uint32_t n, size_t slot_bytes) {
    *n_slots = 16;
    while (*n_slots <= 2 * n) *n_slots *= 2;
    return memset(alloc(*n_slots, slot_bytes, "vocabulary"), -1, *n_slots * slot_bytes);
}

// The slot of a piece in the hash, or the empty slot where it would go.
static uint32_t hash_slot(const Tokenizer *t, const char *text, size_t n) {
    uint32_t slot = 2166136261u; // FNV-1a
    for (size_t i = 0; i < n; i++) slot = (slot ^ (uint8_t)text[i]) * 16777619u;
    for (slot &= t->hash_size - 1; t->hash[slot] >= 0; slot = (slot + 1) & (t->hash_size - 1)) {
        const Piece *p = &t->pieces[t->hash[slot]];
        if ((size_t)p->len == n && !memcmp(p->text, text, n)) break;
    }
    return slot;
}

// The id of a piece of text, or -1.
static int tokenizer_find(const Tokenizer *t, const char *text, size_t n) { return t->hash[hash_slot(t, text, n)]; }

// The slot of a pair of ids among the merges, or the empty slot where it would go.
static Merge *merge_slot(const Tokenizer *t, int left, int right) {
    uint32_t slot = ((uint32_t)left * 2654435761u ^ (uint32_t)right * 2246822519u) & (t->merges_size - 1);
    while (t->merges[slot].left >= 0 && (t->merges[slot].left != left || t->merges[slot].right != right))
        slot = (slot + 1) & (t->merges_size - 1);
    return &t->merges[slot];
}

static void merges_open(Tokenizer *t, uint32_t n) { t->merges = hash_open(&t->merges_size, n, sizeof *t->merges); }

// A pair that is no pair of pieces is left out: no text can contain it. Of two equal pairs the first counts.
static void merges_add(Tokenizer *t, int left, int right, int rank) {
    if (left < 0 || right < 0 || left >= t->n_pieces || right >= t->n_pieces) return;
    Merge *slot = merge_slot(t, left, right);
    if (slot->left < 0) *slot = (Merge){left, right, rank};
}

// The byte that a piece "<0xHH>" stands for, or -1.
static int byte_of_piece(const char *text, int len) {
    static const char digits[] = "0123456789ABCDEF";
    if (len != 6 || memcmp(text, "<0x", 3) || text[5] != '>') return -1;
    const char *high = memchr(digits, text[3], 16), *low = memchr(digits, text[4], 16);
    return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

// Fill the tables from pieces whose types are known. Of two pieces with the same text the first counts.
static void tokenizer_index(Tokenizer *t) {
    t->hash = hash_open(&t->hash_size, (uint32_t)t->n_pieces, sizeof *t->hash);
    t->specials = alloc((size_t)t->n_pieces, sizeof *t->specials, "vocabulary");
    memset(t->byte_ids, -1, sizeof t->byte_ids);
    for (int id = 0; id < t->n_pieces; id++) {
        const Piece *p = &t->pieces[id];
        if (p->type == BYTE_PIECE) {
            int byte = byte_of_piece(p->text, p->len);
            if (byte >= 0 && t->byte_ids[byte] < 0) t->byte_ids[byte] = id;
        } else if (p->type == NORMAL_PIECE && p->len > 0) {
            uint32_t slot = hash_slot(t, p->text, (size_t)p->len);
            if (t->hash[slot] < 0) t->hash[slot] = id;
        } else if ((p->type == USER_PIECE || p->type == CONTROL_PIECE) && p->len > 0) {
            t->specials[t->n_specials++] = id;
        }
    }
}

static bool tokenizer_stops(const Tokenizer *t, int id) {
    for (int i = 0; i < t->n_stop_ids; i++)
        if (t->stop_ids[i] == id) return true;
    return false;
}

// id: below 0 where the file names none.
static void tokenizer_add_stop(Tokenizer *t, int id) {
    if (id < 0 || tokenizer_stops(t, id)) return;
    if (id >= t->n_pieces || t->n_stop_ids == MAX_STOP_IDS)
        die("%s: tokenizer: expected at most %d stop ids, below %d, got %d", t->path, MAX_STOP_IDS, t->n_pieces, id);
    t->stop_ids[t->n_stop_ids++] = id;
}

static void tokenizer_free(Tokenizer *t) {
    void *all[] = {t->pieces, t->text, t->hash, t->merges, t->specials, t->chat_template};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(t);
}

// --- a heap: the entry with the highest score on top, the lowest index among equals. Merges come from one, and the
// candidates of top-k (§10): both want the best few of many in order, without sorting the many.

typedef struct {
    float score;
    int index;
    int len; // of the piece that a merge makes
} Ranked;

static bool ranks_before(Ranked a, Ranked b) { return a.score > b.score || (a.score == b.score && a.index < b.index); }

static void heap_sift_down(Ranked *heap, int n, int i) {
    Ranked moving = heap[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && ranks_before(heap[child + 1], heap[child])) child++;
        if (!ranks_before(heap[child], moving)) break;
        heap[i] = heap[child];
    }
    heap[i] = moving;
}

static Ranked heap_pop(Ranked *heap, int *n) {
    Ranked top = heap[0];
    heap[0] = heap[--*n];
    heap_sift_down(heap, *n, 0);
    return top;
}

static void heap_push(Ranked *heap, int *n, Ranked entry) {
    int i = (*n)++;
    for (; i > 0 && ranks_before(entry, heap[(i - 1) / 2]); i = (i - 1) / 2) heap[i] = heap[(i - 1) / 2];
    heap[i] = entry;
}

// --- text to ids

// A growing list of token ids.
typedef struct {
    int *id;
    int len;
    size_t cap;
} Ids;

static void ids_append(Ids *ids, int id) {
    ids->id = reserve(ids->id, (size_t)ids->len + 1, &ids->cap, sizeof id, "token ids");
    ids->id[ids->len++] = id;
}

// A stretch of the text that is, so far, one piece. The symbols of a text are a doubly linked list.
typedef struct {
    const char *text;
    int len;        // 0: merged into its left neighbour
    int id;         // of the piece, or -1
    int prev, next; // indices, or -1
} Symbol;

// Working memory of an encoding: room for as many symbols as the text has bytes, and three times as many candidates.
typedef struct {
    Symbol *symbols;
    Ranked *heap;
    int n_heap;
} Bpe;

// If the symbol at `left` and the next one merge, they become a candidate.
static void bpe_consider(const Tokenizer *t, Bpe *b, int left) {
    int right = left < 0 ? -1 : b->symbols[left].next;
    if (right < 0) return;
    const Symbol *first = &b->symbols[left], *second = &b->symbols[right];
    int len = first->len + second->len;
    float score;
    if (t->merges_size) {
        if (first->id < 0 || second->id < 0) return;
        const Merge *merge = merge_slot(t, first->id, second->id);
        if (merge->left < 0) return;
        score = -(float)merge->rank;
    } else {
        int id = tokenizer_find(t, first->text, (size_t)len);
        if (id < 0) return;
        score = t->pieces[id].score;
    }
    heap_push(b->heap, &b->n_heap, (Ranked){score, left, len});
}

// Merge n symbols until nothing merges. Each merge makes at most two new candidates, so the heap holds less than 3n.
static void bpe_merge(const Tokenizer *t, Bpe *b, int n) {
    b->n_heap = 0;
    for (int i = 0; i < n; i++) bpe_consider(t, b, i);
    while (b->n_heap > 0) {
        Ranked best = heap_pop(b->heap, &b->n_heap);
        Symbol *left = &b->symbols[best.index];
        if (left->len == 0 || left->next < 0) continue;
        Symbol *right = &b->symbols[left->next];
        if (left->len + right->len != best.len) continue; // one side has merged otherwise since
        left->len += right->len;
        left->id = tokenizer_find(t, left->text, (size_t)left->len);
        right->len = 0;
        left->next = right->next;
        if (left->next >= 0) b->symbols[left->next].prev = best.index;
        bpe_consider(t, b, left->prev);
        bpe_consider(t, b, best.index);
    }
}

// Ids of a stretch of text that merges may span: a word, or for sentencepiece the whole text.
static void bpe_encode(const Tokenizer *t, Bpe *b, const char *text, size_t n, Ids *ids) {
    int n_symbols = 0, whole = t->whole_words ? tokenizer_find(t, text, n) : -1;
    if (whole >= 0) {
        ids_append(ids, whole);
        return;
    }
    for (size_t i = 0; i < n; n_symbols++) {
        int len = t->merges_size ? 1 : max_int(1, utf8_scan(text + i, n - i));
        b->symbols[n_symbols] =
            (Symbol){text + i, len, tokenizer_find(t, text + i, (size_t)len), n_symbols - 1, n_symbols + 1};
        i += (size_t)len;
    }
    b->symbols[n_symbols - 1].next = -1;
    bpe_merge(t, b, n_symbols);
    for (int i = 0; i >= 0; i = b->symbols[i].next) {
        const Symbol *s = &b->symbols[i];
        if (s->id >= 0) ids_append(ids, s->id);
        for (int j = 0; s->id < 0 && j < s->len; j++) {
            int id = t->byte_ids[(uint8_t)s->text[j]];
            if (id < 0) id = t->unknown;
            if (id < 0) die("%s: the vocabulary has no piece for the byte 0x%02X", t->path, (uint8_t)s->text[j]);
            ids_append(ids, id);
        }
    }
}

// The characters c[from..to) of a text are cut by the remaining stages, and the words encoded.
static void encode_words(const Tokenizer *t, Bpe *b, const char *text, const Char *c, int from, int to, int stage,
                         Ids *ids) {
    if (from == to) return;
    if (stage == MAX_STAGES || t->stages[stage] == NO_STAGE) {
        bpe_encode(t, b, text + c[from].at, (size_t)(c[to].at - c[from].at), ids);
        return;
    }
    int gap = from; // the beginning of what no match has covered
    for (int i = from, stop; i < to; i = max_int(stop, i + 1)) {
        stop = match_stage(t->stages[stage], c, i, to);
        if (stop == i) continue;
        encode_words(t, b, text, c, gap, i, stage + 1, ids);
        encode_words(t, b, text, c, i, stop, stage + 1, ids);
        gap = stop;
    }
    encode_words(t, b, text, c, gap, to, stage + 1, ids);
}

// Sentencepiece writes a space as U+2581.
static bool is_escaped_space(const char *text, size_t n) { return n >= 3 && !memcmp(text, "\xE2\x96\x81", 3); }

// With spaces for these. Returns the length of out, which may be text itself.
static int unescape_spaces(const char *text, size_t n, char *out) {
    int len = 0;
    for (size_t i = 0; i < n; len++) {
        bool escaped = is_escaped_space(text + i, n - i);
        out[len] = escaped ? ' ' : text[i];
        i += escaped ? 3 : 1;
    }
    return len;
}

// Text without special pieces.
static void encode_plain(const Tokenizer *t, const char *text, size_t n, Ids *ids) {
    if (n == 0) return;
    Text prepared = {0};
    bool begins_with_space = text[0] == ' ' || is_escaped_space(text, n);
    if (t->space_prefix && !(t->single_prefix && begins_with_space)) text_append(&prepared, " ", 1);
    text_append(&prepared, text, n);
    if (t->escapes_space) prepared.len = (size_t)unescape_spaces(prepared.data, prepared.len, prepared.data);
    Bpe b = {.symbols = alloc(prepared.len, sizeof *b.symbols, "tokenizer")};
    b.heap = alloc(3 * prepared.len, sizeof *b.heap, "tokenizer");
    if (t->merges_size) {
        int n_chars;
        Char *chars = chars_open(prepared.data, prepared.len, &n_chars);
        encode_words(t, &b, prepared.data, chars, 0, n_chars, 0, ids);
        free(chars);
    } else bpe_encode(t, &b, prepared.data, prepared.len, ids);
    free(b.symbols);
    free(b.heap);
    free(prepared.data);
}

// The longest special piece at the beginning of the text, or -1: user-defined ones, and control pieces if asked for.
static int special_at(const Tokenizer *t, const char *text, size_t n, bool control) {
    int best = -1;
    for (int i = 0; i < t->n_specials; i++) {
        const Piece *p = &t->pieces[t->specials[i]];
        if (p->text[0] != text[0] || (size_t)p->len > n || (p->type == CONTROL_PIECE && !control)) continue;
        bool longer = best < 0 || p->len > t->pieces[best].len;
        if (longer && !memcmp(p->text, text, (size_t)p->len)) best = t->specials[i];
    }
    return best;
}

// Append the ids of a text. Pieces that the vocabulary's makers added for users are found in it first; control pieces,
// such as <s> or <|im_start|>, only where `special` says so: otherwise they are text like any other.
static void tokenizer_encode(const Tokenizer *t, const char *text, size_t n, bool special, Ids *ids) {
    if (n > INT_MAX / 8) die("a text of %zu bytes is too long to tokenize, the most is %d", n, INT_MAX / 8);
    bool starts[256] = {false}; // bytes with which some special piece begins
    for (int i = 0; i < t->n_specials; i++) starts[(uint8_t)t->pieces[t->specials[i]].text[0]] = true;
    size_t done = 0;
    for (size_t i = 0; i < n;) {
        int id = starts[(uint8_t)text[i]] ? special_at(t, text + i, n - i, special) : -1;
        if (id < 0) i++;
        else {
            encode_plain(t, text + done, i - done, ids);
            ids_append(ids, id);
            done = i += (size_t)t->pieces[id].len;
        }
    }
    encode_plain(t, text + done, n - done, ids);
}

// --- ids to text

// One id at a time. A character may be spread over several byte pieces: its bytes wait until it is whole. Bytes that
// cannot become a character pass as they are.
typedef struct {
    char pending[4];
    int n_pending;
    bool after_bos; // the next piece begins the text: it loses the space that encoding put in front
} Decoder;

static void decoder_flush(Decoder *d, Text *out) {
    text_append(out, d->pending, (size_t)d->n_pending);
    d->n_pending = 0;
}

static void decoder_byte(Decoder *d, char byte, Text *out) {
    d->pending[d->n_pending++] = byte;
    while (d->n_pending > 0) {
        int len = utf8_scan(d->pending, (size_t)d->n_pending);
        if (len == 0) return;
        len = max_int(len, 1);
        text_append(out, d->pending, (size_t)len);
        d->n_pending -= len;
        memmove(d->pending, d->pending + len, (size_t)d->n_pending);
    }
}

// Append to out what became certain by this id. Control pieces have no text.
static void decoder_push(Decoder *d, const Tokenizer *t, int id, Text *out) {
    const Piece *p = &t->pieces[id];
    if (p->type == CONTROL_PIECE) {
        d->after_bos = id == t->bos;
        return;
    }
    int byte = p->type == BYTE_PIECE ? byte_of_piece(p->text, p->len) : -1;
    if (byte >= 0) decoder_byte(d, (char)byte, out);
    else
        for (int i = d->after_bos && t->space_prefix && p->len > 0 && p->text[0] == ' '; i < p->len; i++)
            decoder_byte(d, p->text[i], out);
    d->after_bos = false;
}

// ---------------------------------------------------------------------------------------------------------------------
// §10 Sampler
//
// From logits to the next token, in this order: repetition penalty, temperature, top-k, softmax, min-p, top-p, draw.
//
//     temperature  logits / T: below 1 the likely become likelier; 0 means no draw, the most likely token
//     top-k        only the k most likely
//     min-p        only those with at least min_p times the probability of the most likely
//     top-p        only the most likely whose probabilities add up to more than p (the nucleus; Holtzman et al. 2020)
//     penalty      logits of tokens already there are divided by it if positive, else multiplied (Keskar et al. 2019)
//
// Tokens of equal rank go by lower id.

typedef struct {
    double temperature, top_p, min_p, repeat_penalty; // as the user wrote them: they count as floats
    int top_k;                                        // 0: all
} Sampling;

enum { STRETCH = 64 }; // a multiple of SUM_LANES

typedef struct {
    Sampling sampling;
    uint64_t rng;
    int n;                      // vocabulary size
    float *p;                   // [n padded to STRETCH] logits, then probabilities
    Ranked *candidates, *spare; // [n]
    bool *seen;                 // [n]
    int n_nucleus; // the last token was drawn from the first so many candidates, or from all of p where this is 0
    float mass;    // their probabilities add up to this
} Sampler;

// The generator is llama2.c's xorshift*, so that a seed means there what it means here. State 0 would stay 0 for ever.
static uint64_t rng_seed(uint64_t seed) { return seed ? seed : 0x9E3779B97F4A7C15u; }

// A float in [0, 1).
static float rng_float(uint64_t *state) {
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    uint32_t high = (uint32_t)((*state * 0x2545F4914F6CDD1Du) >> 32);
    return (float)(high >> 8) / 16777216.0f;
}

static Sampler *sampler_open(Sampling sampling, uint64_t seed, int vocab_size) {
    Sampler *s = alloc(1, sizeof *s, "sampler");
    size_t n = pad((size_t)vocab_size, STRETCH);
    *s = (Sampler){.sampling = sampling, .rng = rng_seed(seed), .n = vocab_size};
    s->p = alloc(n, sizeof *s->p, "sampler");
    s->candidates = alloc(n, sizeof *s->candidates, "sampler");
    s->spare = alloc(n, sizeof *s->spare, "sampler");
    s->seen = alloc(n, sizeof *s->seen, "sampler");
    return s;
}

static void sampler_free(Sampler *s) {
    free(s->p);
    free(s->candidates);
    free(s->spare);
    free(s->seen);
    free(s);
}

// The first of the largest; 0 where none is larger than -infinity. x: [n padded to 16]
static int argmax(float *x, int n) {
    float highest = maximum(x, n);
    for (int i = 0; i < n; i++)
        if (x[i] == highest) return i;
    return 0;
}

// The repetition penalty, once for each token of the history.
static void apply_penalty(Sampler *s, const int *history, int n_history) {
    float penalty = (float)s->sampling.repeat_penalty;
    if (penalty == 1) return;
    for (int i = 0; i < n_history; i++) {
        int id = history[i];
        if (s->seen[id]) continue;
        s->seen[id] = true;
        s->p[id] = s->p[id] > 0 ? s->p[id] / penalty : s->p[id] * penalty;
    }
    for (int i = 0; i < n_history; i++) s->seen[history[i]] = false;
}

// Logits outside the k best become -infinity.
static void apply_top_k(Sampler *s) {
    int k = s->sampling.top_k, n = s->n;
    if (k <= 0 || k >= n) return;
    for (int i = 0; i < n; i++) s->candidates[i] = (Ranked){s->p[i], i, 0};
    for (int i = n / 2 - 1; i >= 0; i--) heap_sift_down(s->candidates, n, i); // makes it a heap
    for (int i = 0; i < s->n; i++) s->p[i] = -INFINITY;
    for (; k > 0; k--) {
        Ranked best = heap_pop(s->candidates, &n);
        s->p[best.index] = best.score;
    }
}

// x: [n padded to 16]
static void softmax(float *x, int n, float max) {
    float sum = exp_and_sum(x, n, max);
    for (int i = 0; i < n; i++) x[i] /= sum;
}

// log sum e^logits: with it, log softmax(logits)[i] = logits[i] - that. logits: [n padded to 16], and is overwritten.
static double log_sum_exp(float *logits, int n) {
    float max = maximum(logits, n);
    return (double)max + log((double)exp_and_sum(logits, n, max));
}

// A draw from all probabilities: walk the ids until the sum exceeds the coin.
static int draw_from_all(const float *p, int n, float coin) {
    float cdf = 0;
    for (int i = 0; i < n; i++) {
        cdf += p[i];
        if (coin < cdf) return i;
    }
    for (int i = n - 1; i > 0; i--) // rounding left a gap below 1
        if (p[i] > 0) return i;
    return 0;
}

// No choice: the next token is this one.
static int draw_from_one(Sampler *s, int id) {
    s->candidates[0] = (Ranked){1, id, 0};
    s->n_nucleus = 1;
    s->mass = 1;
    return id;
}

// A probability below which no token can be part of the nucleus: the highest of some that has mass enough above it (by
// more than a sum is rounded).
static float nucleus_floor(const Sampler *s, float top_p) {
    for (float least = 1e-2f; least > 1e-6f; least *= 0.1f) {
        float lane[SUM_LANES] = {0};
        for (int i = 0; i < s->n; i += SUM_LANES)
            for (int j = 0; j < SUM_LANES; j++) lane[j] += s->p[i + j] >= least ? s->p[i + j] : 0;
        if (sum_lanes(lane) > top_p + 1e-3f) return least;
    }
    return (1 - top_p) / (float)(s->n - 1);
}

// Makes those candidates that have at least the probability `smallest`. Returns how many there are.
static int gather_candidates(Sampler *s, float smallest) {
    int n = 0;
    for (int i = 0; i < s->n; i += STRETCH) { // most stretches have none, and vectors can tell
        int some = 0;
        for (int j = 0; j < STRETCH; j++) some += s->p[i + j] >= smallest;
        for (int j = i; some && j < min_int(i + STRETCH, s->n); j++)
            if (s->p[j] > 0 && s->p[j] >= smallest) s->candidates[n++] = (Ranked){s->p[j], j, 0};
    }
    return n;
}

// Sort candidates by falling probability, equals by rising id, in the same time whether the probabilities are steep or
// flat: a radix sort. Positive floats compare like their bits; 8 bits at a time, from the lowest, keep the order of
// before. spare: [n]
static void sort_candidates(Ranked *candidates, Ranked *spare, int n) {
    enum { DIGITS = 256 };
    for (int shift = 0; shift < 32; shift += 8) {
        int at[DIGITS] = {0}, sum = 0;
        for (int i = 0; i < n; i++) at[~bits_of_float(candidates[i].score) >> shift & 255]++;
        for (int d = 0; d < DIGITS; d++) {
            int count = at[d];
            at[d] = sum;
            sum += count;
        }
        for (int i = 0; i < n; i++) spare[at[~bits_of_float(candidates[i].score) >> shift & 255]++] = candidates[i];
        Ranked *sorted = spare;
        spare = candidates;
        candidates = sorted;
    }
}

// A draw from the nucleus, the fewest of the best candidates whose probabilities add up to more than top_p: the coin
// walks them in falling order.
static int draw_from_nucleus(Sampler *s, float top_p, float smallest, float coin) {
    float cdf = 0;
    if (top_p < 1) smallest = fmaxf(smallest, nucleus_floor(s, top_p));
    int n = gather_candidates(s, smallest);
    if (n == 0) return draw_from_one(s, argmax(s->p, s->n)); // a top_p below 1 / n
    sort_candidates(s->candidates, s->spare, n);
    s->mass = 0;
    for (s->n_nucleus = 0; s->n_nucleus < n && (s->n_nucleus == 0 || s->mass <= top_p); s->n_nucleus++)
        s->mass += s->candidates[s->n_nucleus].score;
    for (int i = 0; i < s->n_nucleus; i++) {
        cdf += s->candidates[i].score;
        if (coin * s->mass < cdf) return s->candidates[i].index;
    }
    return s->candidates[s->n_nucleus - 1].index;
}

// The next token. logits: [n]; history: the ids so far, for the penalty. Returns -1 where the logits hold a NaN or no
// finite maximum: a broken model. One random number is drawn for each token, none at temperature 0.
static int sampler_pick(Sampler *s, const float *logits, const int *history, int n_history) {
    const Sampling *how = &s->sampling;
    const float temperature = (float)how->temperature, min_p = (float)how->min_p, p = (float)how->top_p;
    const float top_p = p > 0 && p < 1 ? p : 1;
    bool broken = false;
    for (int i = 0; i < s->n; i++) broken |= logits[i] != logits[i];
    if (broken) return -1;
    memcpy(s->p, logits, (size_t)s->n * sizeof *logits);
    apply_penalty(s, history, n_history);
    int best = argmax(s->p, s->n);
    if (!isfinite(s->p[best])) return -1;
    if (temperature == 0) return draw_from_one(s, best);
    float coin = rng_float(&s->rng);
    for (int i = 0; i < s->n && temperature != 1; i++) s->p[i] /= temperature;
    if (!isfinite(s->p[best])) return draw_from_one(s, best); // so low a temperature: its limit
    apply_top_k(s);
    softmax(s->p, s->n, s->p[best]); // nothing so far has changed which token is best
    bool cut = (how->top_k > 0 && how->top_k < s->n) || min_p > 0 || top_p < 1;
    if (cut) return draw_from_nucleus(s, top_p, min_p * s->p[best], coin);
    s->n_nucleus = 0;
    return draw_from_all(s->p, s->n, coin);
}

// The probability with which the last pick could have been this token: 0 where it was cut off.
static float sampler_probability(const Sampler *s, int id) {
    for (int i = 0; i < s->n_nucleus; i++)
        if (s->candidates[i].index == id) return s->candidates[i].score / s->mass;
    return s->n_nucleus ? 0 : s->p[id];
}

// ---------------------------------------------------------------------------------------------------------------------
// §11 Sequences
//
// The autoregressive loop: run the newest token through the model, sample the next from the logits, append it, again.
// A Sequence is one text on its way; `step` takes any number of them one token further with a single forward, each by
// its own rows:
//
//   reading    a prompt, in chunks: as many of its tokens as there is room for. Only the last one's logits matter.
//   decoding   one row, its newest token.
//   guessing   after that row, rows of drafted tokens (SPECULATIVE DECODING). The model says after each row what it
//              would sample there, with the random numbers that it would use; while that is what was drafted, the next
//              row is valid as well. So a step makes one token more than it accepts drafts, at little more than the
//              price of one where reading the weights is what takes the time. What is sampled never depends on the
//              drafts, so the text is the same, at any temperature. (Leviathan et al. 2023 and Chen et al. 2023 keep
//              the distribution; keeping the random numbers as well keeps every token.)
//
// Because a logit does not depend on what else is computed with it, no sequence can tell whether it is alone. That is
// CONTINUOUS BATCHING (Yu et al. 2022, Orca): sequences come and go between steps, readers beside decoders, and no
// decoder waits for a reader.
//
// When the context is full a sequence ends, or SLIDES: the first tokens, on which attention leans (Xiao et al. 2024,
// attention sinks), and the newest half are kept, and computed again at their new positions.

enum { MAX_DRAFT = 64, SINKS = 4, LATENCIES = 1024 };

typedef struct {
    double start, prefilled, first, last; // when it began, when the prompt was read, when the first and last token came
    double latency[LATENCIES];            // seconds from token to token: entry i mod LATENCIES, for i < n
    int n;
    int n_prompt, n_made, n_steps, n_drafted, n_accepted; // tokens read, and made; steps that made some; drafts
} Timing;

// How likely a token was: by the logits, and as the sampler saw it, after temperature, top-k, min-p and top-p.
typedef struct {
    int id;
    float logprob, sampled; // natural logarithms
} Score;

typedef enum { FINISH_STOP, FINISH_LENGTH, FINISH_INTERRUPTED } Finish;

typedef struct {
    // What is wanted:
    int max_new;         // tokens to make at most
    const char **stops;  // [n_stops] texts before which it ends
    int n_stops, n_top;  // the n_top best of each step are scored beside the chosen token; -1: no scores
    bool streams, keeps; // its text goes to standard output at once; it is kept
    bool echo;           // the prompt is kept (and scored) too
    bool ignores_eos;    // a stop token is a token like any other
    // What there is so far:
    Ids ids;      // prompt and answer, what the model is shown
    int n_prompt; // the first so many were given
    int n_cached; // the first so many are in the cache
    int place;    // whose cache: the `seq` of its rows
    int n_made;   // tokens sampled, the one that stops included
    Sampler *sampler;
    Decoder decoder;
    Text held;     // text that may be the beginning of a stop string waits here until that is decided
    Text text;     // what is kept, and
    Ids kept;      // as ids, without the one that stops
    Score *scores; // [n_scores]   1 + n_top for each of them
    int n_scores;
    size_t scores_cap;
    bool done;
    Finish finish;
    Timing timing;
    // In the present step:
    int n_rows, n_draft, first_logits;
    int draft[MAX_DRAFT];
} Sequence;

// A small model that guesses what the large one will say.
typedef struct {
    Model *model;
    Session *session;
    Sampler *sampler;
    Ids cached;
} Draft;

// Everything that a mode with a model works with.
typedef struct {
    Model *model;
    Tokenizer *tokenizer;
    Session *session;
    Draft *draft;
    int n_draft; // tokens to draft in a step; from the context where `draft` is NULL
    bool slides; // when the context is full
    int n_threads;
    long long n_rows; // run so far
    double load_seconds;
} Engine;

static volatile sig_atomic_t interrupted; // set by Ctrl-C

static void write_out(const char *bytes, size_t n) {
    if ((n > 0 && fwrite(bytes, 1, n, stdout) != n) || fflush(stdout))
        die("cannot write to standard output: %s", strerror(errno));
}

static void sequence_free(Sequence *q) {
    free(q->ids.id);
    free(q->kept.id);
    free(q->held.data);
    free(q->text.data);
    free(q->scores);
}

// --- text

// Let go of the text that can be shown; `last`: nothing more will come, so nothing waits. Returns whether a stop string
// has appeared: what stands before it is all.
static bool sequence_show(Sequence *q, bool last) {
    size_t n = q->held.len, hold = 0;
    for (int i = 0; i < q->n_stops; i++) {
        const char *stop = q->stops[i];
        size_t len = strlen(stop);
        char *found = q->held.len >= len ? memmem(q->held.data, q->held.len, stop, len) : NULL;
        if (found && found < q->held.data + n) n = (size_t)(found - q->held.data);
        for (size_t k = len - 1; k > hold; k--) // the longest end of the text that begins a stop string
            if (k <= q->held.len && !memcmp(q->held.data + q->held.len - k, stop, k)) hold = k;
    }
    bool stopped = n < q->held.len;
    if (!stopped && !last) n -= hold;
    if (q->streams) write_out(q->held.data, n);
    if (q->keeps) text_append(&q->text, q->held.data, n);
    q->held.len -= n;
    if (q->held.len) memmove(q->held.data, q->held.data + n, q->held.len);
    return stopped;
}

static void sequence_finish(Sequence *q, Finish finish) {
    q->done = true;
    q->finish = finish;
    decoder_flush(&q->decoder, &q->held);
    if (sequence_show(q, true)) q->finish = FINISH_STOP;
}

// --- scores

// Appends the score of a token, and room for those of the n_top best: their ids are -1. Without scores (-1), nothing.
static Score *scores_append(Sequence *q, int id, float value) {
    int begin = q->n_scores;
    q->n_scores += 1 + q->n_top;
    q->scores = reserve(q->scores, (size_t)q->n_scores, &q->scores_cap, sizeof *q->scores, "scores");
    for (int i = begin; i < q->n_scores; i++) q->scores[i] = (Score){i == begin ? id : -1, value, value};
    return q->scores + begin;
}

// Score a token and the n_top best, in falling order. logits: [vocab], from which q's sampler has just picked; they are
// overwritten.
static void sequence_score(Sequence *q, float *logits, int id) {
    const Sampler *s = q->sampler;
    Score *chosen = scores_append(q, id, logits[id]), *best = chosen + 1, *last = chosen + q->n_top;
    for (int i = 0; i < s->n && last > chosen; i++) {
        if (last->id >= 0 && !(logits[i] > last->logprob)) continue;
        Score *at = last; // those that are worse move one further
        for (; at > best && (at[-1].id < 0 || logits[i] > at[-1].logprob); at--) *at = at[-1];
        *at = (Score){i, logits[i], 0};
    }
    double sum = log_sum_exp(logits, s->n);
    for (Score *score = chosen; score <= last; score++) {
        score->logprob = (float)((double)score->logprob - sum);
        score->sampled = logf(sampler_probability(s, score->id));
    }
}

// Keep the prompt as if it had been made. Its first token follows nothing, so nothing says how likely it was.
static void sequence_keep_prompt(Sequence *q, const char *text, size_t len) {
    text_append(&q->text, text, len);
    for (int i = 0; i < q->ids.len; i++) ids_append(&q->kept, q->ids.id[i]);
    scores_append(q, q->ids.id[0], NAN);
}

// The token that follows the first n of `ids`.
static int pick(const Model *m, Sampler *s, const float *logits, const Ids *ids, int n) {
    int id = sampler_pick(s, logits, ids->id, n);
    if (id < 0) die("%s: the logits at position %d are not finite numbers: the weights are broken", m->path, n - 1);
    return id;
}

// Score the token of the prompt at `pos` by the logits of the row before it.
static void sequence_score_prompt(const Engine *e, Sequence *q, float *logits, int pos) {
    uint64_t rng = q->sampler->rng;
    pick(e->model, q->sampler, logits, &q->ids, pos); // for what it would sample from
    q->sampler->rng = rng;
    sequence_score(q, logits, q->ids.id[pos]);
}

// --- drafts

// Drafts from the context: where the newest tokens have stood before, what followed them there may follow again (and,
// after the end of the text, the draft itself). The longest match counts, the newest among equals. Returns n, or 0: no
// match. Ref: Saxena 2023, prompt lookup decoding.
static int draft_from_context(const Ids *ids, int n, int *draft) {
    enum { SHORTEST = 2, LONGEST = 16 };
    int longest = SHORTEST - 1, at = ids->len;
    for (int t = ids->len - 1; t > longest && longest < LONGEST; t--) {
        int len = 0;
        while (len < LONGEST && len < t && ids->id[t - 1 - len] == ids->id[ids->len - 1 - len]) len++;
        if (len > longest) at = t;
        longest = max_int(longest, len);
    }
    if (at == ids->len) return 0;
    for (int i = 0; i < n; i++) draft[i] = at + i < ids->len ? ids->id[at + i] : draft[at + i - ids->len];
    return n;
}

// With how many of `ids` the cache of a sequence can go on: those that it begins with, if it still has what the next
// one may see. The last one is always to be run, for its logits. cached: [n_cached] what the sequence has computed.
static int common_prefix(const Session *s, int seq, const Ids *cached, int n_cached, const Ids *ids) {
    int common = 0;
    while (common < ids->len - 1 && common < n_cached && ids->id[common] == cached->id[common]) common++;
    return cache_reaches(s, seq, common) ? common : 0;
}

// Run ids[0..n) at positions from pos on through a model, in chunks. The logits of the last are s->logits. Returns
// false where Ctrl-C came first.
static bool prefill(Session *s, const int *ids, int n, int pos, int seq) {
    int done = 0;
    for (int count; done < n && !interrupted; done += count) {
        count = min_int(n - done, s->max_rows);
        for (int i = 0; i < count; i++) s->rows[i] = (Row){ids[done + i], pos + done + i, seq, done + i == n - 1};
        forward(s, s->rows, count);
    }
    return done == n;
}

// Drafts from a small model, which samples as the large one will and with the same random numbers: the more its
// probabilities are alike, the more often both draw the same.
static int draft_from_model(Draft *d, const Sequence *q, int n, int *draft) {
    int common = common_prefix(d->session, 0, &d->cached, d->cached.len, &q->ids);
    d->cached.len = common;
    if (!prefill(d->session, q->ids.id + common, q->ids.len - common, common, 0)) return 0;
    for (int i = common; i < q->ids.len; i++) ids_append(&d->cached, q->ids.id[i]);
    d->sampler->rng = q->sampler->rng;
    for (int i = 0;;) {
        draft[i] = pick(d->model, d->sampler, d->session->logits, &d->cached, d->cached.len);
        if (++i == n) return n;
        forward(d->session, &(Row){draft[i - 1], d->cached.len, 0, true}, 1);
        ids_append(&d->cached, draft[i - 1]);
    }
}

// --- the step

// Make room: keep the first tokens and the newest half of the context, to be computed again where they now stand.
static void sequence_slide(Sequence *q, int n_ctx) {
    int sinks = min_int(SINKS, n_ctx / 4), newest = max_int(1, n_ctx / 2);
    memmove(q->ids.id + sinks, q->ids.id + q->ids.len - newest, (size_t)newest * sizeof *q->ids.id);
    q->ids.len = sinks + newest;
    q->n_cached = q->n_prompt = 0;
}

// Draft what may follow, for at most `room` rows. Returns how many tokens that are.
static int sequence_draft(Engine *e, Sequence *q, int room) {
    int n = min_int(e->n_draft, room);
    n = min_int(n, q->max_new - q->n_made - 1);     // the step makes one more than it accepts
    n = min_int(n, e->session->n_ctx - q->ids.len); // each needs a position
    if (n <= 0) return 0;
    return e->draft ? draft_from_model(e->draft, q, n, q->draft) : draft_from_context(&q->ids, n, q->draft);
}

// The rows with which a sequence goes on, at most `room`: what the cache lacks of it, then drafts. Returns how many of
// them want logits.
static int sequence_plan(Engine *e, Sequence *q, Row *rows, int room) {
    int missing = q->ids.len - q->n_cached, n = min_int(missing, room), wanted = 0;
    q->n_draft = n == missing ? sequence_draft(e, q, room - n) : 0;
    q->n_rows = n + q->n_draft;
    for (int i = 0; i < q->n_rows; i++) {
        int pos = q->n_cached + i, token = i < n ? q->ids.id[pos] : q->draft[i - n];
        bool scored = q->echo && q->n_top >= 0 && pos + 1 < q->n_prompt;
        rows[i] = (Row){token, pos, q->place, i >= missing - 1 || scored};
        wanted += rows[i].want_logits;
    }
    return wanted;
}

// Sample the next token and take it in. logits: [vocab]
static void sequence_sample(const Engine *e, Sequence *q, float *logits) {
    int id = pick(e->model, q->sampler, logits, &q->ids, q->ids.len);
    q->n_made++;
    if (!q->ignores_eos && tokenizer_stops(e->tokenizer, id)) {
        sequence_finish(q, FINISH_STOP);
        return;
    }
    if (q->n_top >= 0) sequence_score(q, logits, id);
    if (q->keeps) ids_append(&q->kept, id);
    ids_append(&q->ids, id);
    decoder_push(&q->decoder, e->tokenizer, id, &q->held);
    bool stopped = sequence_show(q, false);
    if (stopped || q->n_made == q->max_new) sequence_finish(q, stopped ? FINISH_STOP : FINISH_LENGTH);
}

// The tokens that a step has made arrived together: each gets its share of the time. Those of the first step were not
// waited for one by one.
static void sequence_time(Sequence *q, int made) {
    Timing *t = &q->timing;
    double now = seconds();
    if (made == q->n_made) t->first = now;
    else
        for (int i = 0; i < made; i++) t->latency[t->n++ % LATENCIES] = (now - t->last) / made;
    t->last = now;
    t->n_made = q->n_made;
    t->n_steps++;
}

// Take in what forward found for a sequence.
static void sequence_advance(const Engine *e, Sequence *q) {
    size_t stride = e->session->vocab_stride;
    float *logits = e->session->logits + (size_t)q->first_logits * stride;
    int n = q->n_rows - q->n_draft, made = q->n_made;
    for (int i = 1; i <= n && q->echo && q->n_top >= 0 && q->n_cached + i < q->n_prompt; i++, logits += stride)
        sequence_score_prompt(e, q, logits, q->n_cached + i);
    q->n_cached += n;
    if (!made) q->timing.n_prompt += n;
    if (!made && q->streams) show_progress("reading the prompt, tokens", q->n_cached, q->ids.len, q->timing.start);
    if (q->n_cached < q->ids.len) return;
    if (!q->timing.prefilled) q->timing.prefilled = seconds();
    if (q->max_new == 0) sequence_finish(q, FINISH_LENGTH);
    for (int i = 0; !q->done; i++, logits += stride) {
        sequence_sample(e, q, logits);
        if (q->done || i == q->n_draft || q->ids.id[q->ids.len - 1] != q->draft[i]) break;
        q->n_cached++; // this draft was right, so its row is
        q->timing.n_accepted++;
    }
    q->timing.n_drafted += q->n_draft;
    if (q->n_made > made) sequence_time(q, q->n_made - made);
}

// Take n sequences a step further, with one forward: those that decode, then as much of the prompts as there is room
// for, in their order.
static void step(Engine *e, Sequence *const *all, int n) {
    Session *s = e->session;
    int n_rows = 0, n_logits = 0;
    for (int i = 0; i < n; i++) {
        if (all[i]->ids.len > s->n_ctx) sequence_slide(all[i], s->n_ctx);
        all[i]->n_rows = 0;
    }
    for (int reading = 0; reading < 2; reading++)
        for (int i = 0; i < n; i++) {
            Sequence *q = all[i];
            if ((q->ids.len - q->n_cached > 1) != reading) continue;
            q->first_logits = n_logits;
            n_logits += sequence_plan(e, q, s->rows + n_rows, s->max_rows - n_rows);
            n_rows += q->n_rows;
        }
    forward(s, s->rows, n_rows);
    e->n_rows += n_rows;
#pragma omp parallel for num_threads(e->n_threads) schedule(dynamic) if (n > 1)
    for (int i = 0; i < n; i++)
        if (all[i]->n_rows) sequence_advance(e, all[i]);
}

// A sequence that is alone, to its end or Ctrl-C.
static void sequence_run(Engine *e, Sequence *q) {
    q->timing.start = seconds();
    while (!q->done && !interrupted) step(e, &q, 1);
    if (!q->timing.prefilled) q->timing.prefilled = seconds(); // as far as it got
    if (!q->done) sequence_finish(q, FINISH_INTERRUPTED);
}

// ---------------------------------------------------------------------------------------------------------------------
// §12 Packing
//
// Part II: from the bytes of a file to a Model. Headers and metadata pass one cursor, the Reader; that the tensors lie
// in the file is checked once. A loader (§13, §14) finds where the rows of each tensor lie; tensor_load unpacks and
// rearranges them into panels, on all threads.

static Mapping map_file(const char *path) {
    int fd = open(path, O_RDONLY);
    if (fd < 0) die("%s: cannot open: %s", path, strerror(errno));
    struct stat status;
    if (fstat(fd, &status)) die("%s: cannot stat: %s", path, strerror(errno));
    if (S_ISDIR(status.st_mode)) die("%s: is a directory, expected a file", path);
    if (!S_ISREG(status.st_mode)) die("%s: is not a regular file", path);
    if (status.st_size == 0) die("%s: the file is empty", path);
    Mapping file = {path, NULL, (size_t)status.st_size};
    void *data = mmap(NULL, file.size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) die("%s: cannot map %zu bytes: %s", path, file.size, strerror(errno));
    close(fd);
    file.data = data;
    return file;
}

static void unmap_file(Mapping *file) {
    if (file->data) munmap((void *)file->data, file->size);
    file->data = NULL;
}

// The file's bytes have been turned into panels: let go of the memory that they occupy here.
static void mapping_release(const Mapping *file, const uint8_t *data, size_t n) {
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t begin = pad((size_t)(data - file->data), page), end = (size_t)(data - file->data + n) / page * page;
    if (begin < end) madvise((void *)(file->data + begin), end - begin, MADV_DONTNEED);
}

// The cursor: reader_take refuses to step past the end of the file. Numbers may lie at any alignment: they are copied.
typedef struct {
    const char *path;
    const uint8_t *data;
    size_t size, pos;
} Reader;

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "checkpoints are little-endian, and so must the machine be");

static const uint8_t *reader_take(Reader *r, size_t n, const char *what) {
    if (n > r->size - r->pos)
        die("%s: truncated: %s needs %zu bytes at offset %zu, the file has %zu bytes", r->path, what, n, r->pos,
            r->size);
    const uint8_t *bytes = r->data + r->pos;
    r->pos += n;
    return bytes;
}

static int32_t reader_i32(Reader *r, const char *what) {
    int32_t value;
    memcpy(&value, reader_take(r, sizeof value, what), sizeof value);
    return value;
}

static uint32_t reader_u32(Reader *r, const char *what) { return (uint32_t)reader_i32(r, what); }
static float reader_f32(Reader *r, const char *what) { return float_from_bits(reader_u32(r, what)); }

static uint64_t reader_u64(Reader *r, const char *what) {
    uint64_t value;
    memcpy(&value, reader_take(r, sizeof value, what), sizeof value);
    return value;
}

// Something in a file is wrong: one line that names it.
__attribute__((format(printf, 4, 5))) static noreturn void die_about(const char *path, const char *kind, String name,
                                                                     const char *format, ...) {
    char message[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(message, sizeof message, format, args);
    die("%s: %s %.*s: %s", path, kind, shown(name), name.text, message);
}

// --- hyperparameters

#define AT_CONFIG(field) offsetof(Config, field)
static const struct {
    const char *name, *key; // key: in a GGUF file, after the name of the architecture
    size_t at;              // of an int in Config
    int least, most;        // what no sane model exceeds: so products of two of these fit a size_t with room to spare
} hyperparameters[] = {
    {"dim", ".embedding_length", AT_CONFIG(dim), 1, 1 << 20},
    {"hidden_dim", ".feed_forward_length", AT_CONFIG(hidden_dim), 1, 1 << 22},
    {"n_layers", ".block_count", AT_CONFIG(n_layers), 1, 1 << 12},
    {"n_heads", ".attention.head_count", AT_CONFIG(n_heads), 1, 1 << 14},
    {"n_kv_heads", ".attention.head_count_kv", AT_CONFIG(n_kv_heads), 1, 1 << 14},
    {"head_dim", ".attention.key_length", AT_CONFIG(head_dim), 1, 1 << 14},
    {"vocab_size", NULL, AT_CONFIG(vocab_size), 1, 1 << 24},
    {"trained context", ".context_length", AT_CONFIG(n_ctx_train), 1, 1 << 30},
    {"sliding window", ".attention.sliding_window", AT_CONFIG(sliding_window), 0, INT_MAX},
};
enum { N_HYPERPARAMETERS = sizeof hyperparameters / sizeof *hyperparameters };

static int *hyperparameter(const Config *c, int i) { return (int *)((char *)c + hyperparameters[i].at); }

// Refuse what no sane model has before anything is computed from it.
static void config_check(const Config *c, const char *path, const char *format) {
    const char *unsound = "not a sound";
    const String what = {format, strlen(format)};
    for (int i = 0; i < N_HYPERPARAMETERS; i++) {
        int value = *hyperparameter(c, i), least = hyperparameters[i].least, most = hyperparameters[i].most;
        if (value < least || value > most)
            die_about(path, unsound, what, "expected %s from %d to %d, got %d", hyperparameters[i].name, least, most,
                      value);
    }
    if (c->n_heads % c->n_kv_heads)
        die_about(path, unsound, what, "expected n_heads to be a multiple of n_kv_heads, got %d and %d", c->n_heads,
                  c->n_kv_heads);
    if (c->head_dim % 2)
        die_about(path, unsound, what, "expected an even head_dim (RoPE turns pairs), got %d", c->head_dim);
    if ((size_t)c->n_heads * (size_t)c->head_dim > 1 << 22)
        die_about(path, unsound, what, "%d heads of %d are too wide", c->n_heads, c->head_dim);
    if (!(c->norm_eps >= 0 && c->norm_eps < 1))
        die_about(path, unsound, what, "expected a norm epsilon from 0 to 1, got %g", (double)c->norm_eps);
    if (!(c->rope_base > 1 && c->rope_base < 1e12 && c->rope_factor >= 1e-3 && c->rope_factor <= 1e6 &&
          c->rope_n_ctx > 0))
        die_about(path, unsound, what, "RoPE has base %g, factor %g, context %d", c->rope_base, c->rope_factor,
                  c->rope_n_ctx);
}

// --- the number formats of files

// A type of weights in a file, and the panel that holds it without loss (§2).
typedef struct Part Part;
typedef struct {
    const char *name;
    int id;      // in a GGUF file, or -1
    int columns; // weights in a block
    int bytes;   // of a block
    Type type;   // of the panel, and so on as in Matrix
    Scaling scaling;
    int group, zero;
    bool has_min;
    void (*unpack)(Part *p); // NULL: plain, the panel's steps as they are
} Format;

// 32 neighbouring weights of a row: where the file has them, and unpacked.
struct Part {
    const Format *format;
    const uint8_t *block;
    int part;           // which 32 of the block
    int8_t q[32];       // integers, or indices of values
    float factor[2];    // of the scales, and of the minima
    uint8_t code[2][2]; // the integers of the scales, and of the minima, for each half
};

static float load_f16(const uint8_t *p) { return float_from_f16(load_u16(p)); }

// What most formats have: byte j with number j in its low 4 bits, number j + 16 in the high ones;
static void unpack_nibbles(Part *p, const uint8_t *n) {
    for (int j = 0; j < 16; j++) {
        p->q[j] = n[j] & 15;
        p->q[j + 16] = n[j] >> 4;
    }
}

// and 32 bytes for 4 parts, each of which has 2 bits of every byte.
static void unpack_crumbs(Part *p, const uint8_t *n) {
    for (int j = 0; j < 32; j++) p->q[j] = n[p->part / 4 * 32 + j] >> p->part % 4 * 2 & 3;
}

// Q8_0, 34 bytes:  [ d f16 | 32 x int8 ]                              w = d q
static void unpack_q8_0(Part *p) {
    p->factor[0] = load_f16(p->block);
    memcpy(p->q, p->block + 2, 32);
}

// Q4_0, 18 bytes:  [ d f16 | 16 bytes n ]                             w = d (q - 8); IQ4_NL: w = d value[q]
// Q4_1, 20 bytes:  [ d f16 | m f16 | 16 bytes n ]                     w = d q + m
// Q5_0, 22 bytes:  [ d f16 | high 4 bytes | 16 bytes n ]              w = d (q - 16), q = n + 16 * bit of high
// Q5_1, 24 bytes:  [ d f16 | m f16 | high 4 bytes | 16 bytes n ]      w = d q + m
static void unpack_q4_q5(Part *p) {
    const bool has_min = p->format->has_min, five = p->format->type == I5;
    const uint8_t *high = p->block + (has_min ? 4 : 2);
    p->factor[0] = load_f16(p->block);
    p->factor[1] = has_min ? load_f16(p->block + 2) : 0;
    unpack_nibbles(p, high + (five ? 4 : 0));
    for (int j = 0; j < 32 && five; j++) p->q[j] |= (int8_t)((high[j / 8] >> j % 8 & 1) << 4);
}

// Q4_K, 144 bytes for 8 parts of 32:  [ d f16 | dmin f16 | s 12 bytes | 128 bytes n ]     w = d scale q - dmin min
// Q5_K, 176 bytes:  [ d f16 | dmin f16 | s 12 bytes | high 32 bytes | 128 bytes n ]
// s holds 8 scales and 8 minima of 6 bits: those of parts 0..3 in the low 6 bits of bytes 0..3 (scales) and 4..7
// (minima); of parts 4..7 the low 4 bits in bytes 8..11 and the high 2 on top of bytes 0..7. Each 32 bytes of n hold
// two parts, the even one in the low 4 bits. The fifth bit of a weight is bit `part` of high[j].
static void unpack_q4_q5_k(Part *p) {
    const int part = p->part, five = p->format->type == I5;
    const uint8_t *b = p->block, *s = b + 4, *high = b + 16, *n = high + (five ? 32 : 0) + part / 2 * 32;
    int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | s[part - 4] >> 6 << 4;
    int min = part < 4 ? s[part + 4] & 63 : s[part + 4] >> 4 | s[part] >> 6 << 4;
    p->factor[0] = load_f16(b);
    p->factor[1] = -load_f16(b + 2);
    for (int half = 0; half < 2; half++) {
        p->code[0][half] = (uint8_t)scale;
        p->code[1][half] = (uint8_t)min;
    }
    for (int j = 0; j < 32; j++) p->q[j] = n[j] >> part % 2 * 4 & 15;
    for (int j = 0; j < 32 && five; j++) p->q[j] |= (int8_t)((high[j] >> part & 1) << 4);
}

// Q6_K, 210 bytes:  [ 128 bytes low | 64 bytes high | 16 x int8 scale | d f16 ]     w = d scale (q - 32), groups of 16
// Of each half of 4 parts: parts 0, 1 have their low 4 bits in the low nibbles of 64 bytes, parts 2, 3 in the high
// nibbles; the 2 bits above are those of the crumbs.
static void unpack_q6_k(Part *p) {
    const uint8_t *b = p->block, *low = b + p->part / 4 * 64 + p->part % 2 * 32;
    p->factor[0] = load_f16(b + 208);
    for (int half = 0; half < 2; half++) p->code[0][half] = b[192 + 2 * p->part + half];
    unpack_crumbs(p, b + 128);
    for (int j = 0; j < 32; j++) p->q[j] = (int8_t)((low[j] >> p->part % 4 / 2 * 4 & 15) | p->q[j] << 4);
}

// Q3_K, 110 bytes:  [ high 32 bytes | crumbs 64 bytes | s 12 bytes | d f16 ]     w = d (scale - 32) (q - 4), in 16s
// s holds 16 scales of 6 bits: the low 4 bits of scales 0..7 in the low nibbles of 8 bytes, of 8..15 in the high ones;
// the 2 bits above in the crumbs of the last 4 bytes. The third bit of a weight is bit `part` of high[j].
static void unpack_q3_k(Part *p) {
    const uint8_t *b = p->block, *s = b + 96;
    p->factor[0] = load_f16(b + 108);
    for (int half = 0; half < 2; half++) {
        int g = 2 * p->part + half;
        p->code[0][half] = (uint8_t)(((s[g % 8] >> g / 8 * 4 & 15) | (s[8 + g % 4] >> g / 4 * 2 & 3) << 4) - 32);
    }
    unpack_crumbs(p, b + 32);
    for (int j = 0; j < 32; j++) p->q[j] |= (int8_t)((b[j] >> p->part & 1) << 2);
}

// Q2_K, 84 bytes:  [ 16 bytes scale and min | crumbs 64 bytes | d f16 | dmin f16 ]     w = d scale q - dmin min, groups
// of 16: the scale in the low 4 bits of a byte, the minimum in the high ones.
static void unpack_q2_k(Part *p) {
    const uint8_t *b = p->block;
    p->factor[0] = load_f16(b + 80);
    p->factor[1] = -load_f16(b + 82);
    for (int half = 0; half < 2; half++) p->code[0][half] = p->code[1][half] = b[2 * p->part + half];
    unpack_crumbs(p, b + 16);
}

// IQ4_XS, 136 bytes:  [ d f16 | 2 bytes, crumbs | 4 bytes, nibbles | 8 x 16 bytes n ]     w = d (scale - 32) value[q]
// The scale of a part: 4 bits among the nibbles, 2 bits above them among the crumbs.
static void unpack_iq4_xs(Part *p) {
    const uint8_t *b = p->block;
    int scale = (b[4 + p->part / 2] >> p->part % 2 * 4 & 15) | (load_u16(b + 2) >> p->part * 2 & 3) << 4;
    p->factor[0] = load_f16(b);
    p->code[0][0] = p->code[0][1] = (uint8_t)(scale - 32);
    unpack_nibbles(p, b + 8 + p->part * 16);
}

// MXFP4, 17 bytes:  [ e | 16 bytes n ]     w = 2^(e - 128) value[q]
static void unpack_mxfp4(Part *p) {
    p->code[0][0] = p->code[0][1] = p->block[0];
    unpack_nibbles(p, p->block + 1);
}

// TQ2_0, 66 bytes:  [ crumbs 64 bytes | d f16 ]     w = d (q - 1), q 0, 1 or 2
static void unpack_tq2_0(Part *p) {
    p->factor[0] = load_f16(p->block + 64);
    unpack_crumbs(p, p->block);
}

// TQ1_0, 54 bytes:  [ 32 bytes | 16 bytes | 4 bytes | d f16 ]     w = d (q - 1)
// A byte holds up to five q, as the digits of a fraction to the base 3: b / 256 = 0.q0 q1 q2 q3 q4. The first 32 bytes
// have q0 for weights 0..31, q1 for 32..63, up to 159; so have the 16 bytes for 160..239, the 4 bytes for 240..255.
static void unpack_tq1_0(Part *p) {
    p->factor[0] = load_f16(p->block + 52);
    for (int j = 0; j < 32; j++) {
        int i = 32 * p->part + j, from = i < 160 ? 0 : i < 240 ? 160 : 240, n = i < 160 ? 32 : i < 240 ? 16 : 4;
        uint8_t digits = p->block[from / 5 + (i - from) % n];
        for (int digit = (i - from) / n; digit > 0; digit--) digits = (uint8_t)(digits * 3);
        p->q[j] = (int8_t)(digits * 3 >> 8);
    }
}

static const Format formats[] = {
    {"F32", 0, 1, 4, F32, SCALE_F32, 0, 0, false, NULL},
    {"F16", 1, 1, 2, F16, SCALE_F32, 0, 0, false, NULL},
    {"BF16", 30, 1, 2, BF16, SCALE_F32, 0, 0, false, NULL},
    {"Q8_0", 8, 32, 34, I8, SCALE_F16, 32, 0, false, unpack_q8_0},
    {"Q4_0", 2, 32, 18, I4, SCALE_F16, 32, 8, false, unpack_q4_q5},
    {"Q4_1", 3, 32, 20, I4, SCALE_F16, 32, 0, true, unpack_q4_q5},
    {"Q5_0", 6, 32, 22, I5, SCALE_F16, 32, 16, false, unpack_q4_q5},
    {"Q5_1", 7, 32, 24, I5, SCALE_F16, 32, 0, true, unpack_q4_q5},
    {"Q2_K", 10, 256, 84, I2, SCALE_NIBBLES, 16, 0, true, unpack_q2_k},
    {"Q3_K", 11, 256, 110, I3, SCALE_PRODUCT, 16, 4, false, unpack_q3_k},
    {"Q4_K", 12, 256, 144, I4, SCALE_PRODUCT, 32, 0, true, unpack_q4_q5_k},
    {"Q5_K", 13, 256, 176, I5, SCALE_PRODUCT, 32, 0, true, unpack_q4_q5_k},
    {"Q6_K", 14, 256, 210, I6, SCALE_PRODUCT, 16, 32, false, unpack_q6_k},
    {"IQ4_NL", 20, 32, 18, IQ4, SCALE_F16, 32, 0, false, unpack_q4_q5},
    {"IQ4_XS", 23, 256, 136, IQ4, SCALE_PRODUCT, 32, 0, false, unpack_iq4_xs},
    {"MXFP4", 39, 32, 17, FP4, SCALE_POWER, 32, 0, false, unpack_mxfp4},
    {"TQ1_0", 34, 256, 54, I2, SCALE_F16, 256, 1, false, unpack_tq1_0},
    {"TQ2_0", 35, 256, 66, I2, SCALE_F16, 256, 1, false, unpack_tq2_0},
    // Known by name only: their weights are points of a lattice, looked up eight or four at a time.
    {.name = "IQ1_S", .id = 19},
    {.name = "IQ1_M", .id = 29},
    {.name = "IQ2_XXS", .id = 16},
    {.name = "IQ2_XS", .id = 17},
    {.name = "IQ2_S", .id = 22},
    {.name = "IQ3_XXS", .id = 18},
    {.name = "IQ3_S", .id = 21},
    // llama2.c's: scales in an array of their own, groups of any size
    {"int8", -1, 1, 1, I8, SCALE_F32, 0, 0, false, NULL},
};
enum { N_FORMATS = sizeof formats / sizeof *formats };
static const Format *const FORMAT_F32 = &formats[0], *const FORMAT_INT8 = &formats[N_FORMATS - 1];

static const Format *format_by_id(uint32_t id) {
    for (int i = 0; i < N_FORMATS; i++)
        if (formats[i].id >= 0 && (uint32_t)formats[i].id == id) return &formats[i];
    return NULL;
}

// Where a loader finds the rows of a tensor.
typedef struct {
    const Format *format;
    const uint8_t *weights;
    const uint8_t *scales; // llama2.c's int8: a float for each `group` weights of the whole tensor, at any alignment
    size_t group;
    int turn_halves; // head_dim, where each head's rows i and i + head_dim / 2 become neighbours; else 0
} Source;

// The row of the file that becomes row r.
static int source_row(const Source *s, int r) {
    if (!s->turn_halves) return r;
    int head = r / s->turn_halves, i = r % s->turn_halves;
    return head * s->turn_halves + i / 2 + i % 2 * (s->turn_halves / 2);
}

static size_t row_bytes(const Format *f, int cols) { return (size_t)(cols / f->columns) * (size_t)f->bytes; }

// Weights 32 * i to 32 * i + 31 of a row of blocks.
static Part unpack(const Format *f, const uint8_t *row, int i) {
    int parts = f->columns / 32;
    Part p = {.format = f, .block = row + (size_t)(i / parts) * (size_t)f->bytes, .part = i % parts};
    f->unpack(&p);
    return p;
}

// A row of the file as floats. cols is a multiple of the format's columns.
static void source_floats(const Source *s, int row, int cols, float *out) {
    const Format *f = s->format;
    const uint8_t *from = s->weights + (size_t)row * row_bytes(f, cols);
    for (int i = 0; f->unpack && i < cols / 32; i++) {
        Part p = unpack(f, from, i);
        for (int j = 0; j < 32; j++) {
            int q = types[f->type].values ? types[f->type].values[p.q[j]] : p.q[j] - f->zero;
            float min = f->has_min ? scale_value(f->scaling, p.factor[1], p.code[1][j / 16], 1) : 0;
            out[32 * i + j] = scale_value(f->scaling, p.factor[0], p.code[0][j / 16], 0) * (float)q + min;
        }
    }
    for (int k = 0; !f->unpack && k < cols; k++) {
        if (f->type == F32) out[k] = float_from_bits(load_u32(from + 4 * k));
        if (f->type == F16) out[k] = load_f16(from + 2 * k);
        if (f->type == BF16) out[k] = float_from_bf16(load_u16(from + 2 * k));
        if (f->type == I8) {
            size_t group = ((size_t)row * (size_t)cols + (size_t)k) / s->group;
            out[k] = (float)(int8_t)from[k] * float_from_bits(load_u32(s->scales + 4 * group));
        }
    }
}

// --- into panels

// Steps as the file has them -> row r of a panel.
static void pack_steps(uint32_t *panel, const void *row, int r, size_t n_steps) {
    for (size_t i = 0; i < n_steps; i++) memcpy(panel + i * PANEL + (size_t)r, (const uint8_t *)row + i * 4, 4);
}

// The scales and minima of one half of a part -> lane r of a place.
static void pack_scales(const Matrix *w, ScalePlace at, int r, const Part *part, int half) {
    for (int which = 0; which <= w->has_min; which++) {
        uint16_t factor = f16_from_float(part->factor[which]); // it came from a half: exact
        uint8_t *to = (uint8_t *)place_factors(w->scaling, at, r, which);
        if (scalings[w->scaling].factor_bytes) memcpy(to, &factor, sizeof factor);
        to = (uint8_t *)place_codes(w->scaling, at, r, which);
        if (scalings[w->scaling].code_bytes) *to = part->code[which][half];
    }
}

// A row of blocks -> row r of panel p.
static void pack_blocks(const Matrix *w, const Format *f, const uint8_t *row, size_t p, int r) {
    const int low = types[w->type].low, high = types[w->type].high;
    const int columns = min_int(w->group, 32); // that share a scale within a part
    uint32_t *step = (uint32_t *)w->panels + p * panel_words(w) + r;
    ScaleCursor cursor = cursor_open(w, p, 0);
    for (int i = 0; i < w->cols / 32; i++) {
        Part part = unpack(f, row, i);
        uint32_t steps[8] = {0};
        for (int j = 0; j < 8; j++) {
            uint32_t word = load_u32(part.q + 4 * j);
            steps[j * low / 8] |= (word & low_bits(low)) << j * low % 8;
            if (high) steps[low + j * high / 8] |= (word >> low & low_bits(high)) << j * high % 8;
        }
        for (int j = 0; j < low + high; j++, step += PANEL) *step = steps[j];
        for (int k = 0; k < 32; k += columns, cursor_advance(&cursor, columns))
            pack_scales(w, cursor.at, r, &part, k / 16);
    }
}

// Row `from` of the file -> row r of panel p.
static void pack_row(const Matrix *w, const Source *s, int from, size_t p, int r) {
    const Format *f = s->format;
    const uint8_t *row = s->weights + (size_t)from * row_bytes(f, w->cols);
    uint32_t *panel = (uint32_t *)w->panels + p * panel_words(w);
    size_t n_steps = panel_words(w) / PANEL;
    if (w->type == F32 && f->type != F32) {
        float *values = alloc((size_t)w->cols, sizeof *values, "a row");
        source_floats(s, from, w->cols, values);
        pack_steps(panel, values, r, n_steps);
        free(values);
    } else if (f->unpack) pack_blocks(w, f, row, p, r);
    else pack_steps(panel, row, r, n_steps);
    if (w->type != F32 && s->scales) {
        size_t groups = (size_t)(w->cols / w->group);
        pack_steps((uint32_t *)w->scales + p * groups * PANEL, s->scales + (size_t)from * groups * 4, r, groups);
    }
}

// Row-major weights in the file -> panels, on all threads. What a panel cannot hold as it is becomes floats: rows that
// end within a step, and groups of llama2.c's that cross rows or are too small. Right before fast.
static Matrix matrix_load(int rows, int cols, const Source *s, int n_threads) {
    (void)n_threads; // which only OpenMP reads
    const Format *f = s->format;
    size_t group = s->scales ? s->group : (size_t)f->group;
    bool fits = cols % step_columns(f->type) == 0 && (!group || ((size_t)cols % group == 0 && group % 16 == 0));
    Matrix w = {.type = F32, .rows = rows, .cols = cols};
    if (fits) {
        w.type = f->type == I8 && group % 32 ? I8_16 : f->type;
        w.scaling = f->scaling;
        w.group = (int)group;
        w.zero = f->zero;
        w.has_min = f->has_min;
    }
    size_t n = matrix_panels(&w);
    w.panels = alloc_pages(n, panel_words(&w) * 4, "weights");
    if (is_quantized(w.type)) w.scales = alloc_pages(n, scale_layout(&w).panel, "scales");
#pragma omp parallel for schedule(static) num_threads(n_threads) if (n > 64) // else done before a thread wakes up
    for (size_t p = 0; p < n; p++)
        for (int r = 0; r < min_int(PANEL, rows - (int)p * PANEL); r++)
            pack_row(&w, s, source_row(s, (int)p * PANEL + r), p, r);
    return w;
}

static void matrix_free(Matrix *w) {
    size_t n = matrix_panels(w);
    free_pages((void *)w->panels, n, panel_words(w) * 4);
    free_pages((void *)w->scales, n, scale_layout(w).panel);
}

// --- into a model

// Puts a tensor where it belongs. turns_halves: the file has other pairs for RoPE than we.
static void tensor_load(Model *m, const Tensor *t, int layer, Source s, bool turns_halves) {
    int rows = dim_of(&m->config, t->rows), cols = dim_of(&m->config, t->cols);
    void *place = tensor_field(m, t, layer);
    s.turn_halves = turns_halves && t->flags & TURNS ? m->config.head_dim : 0;
    if (t->rows != VECTOR) {
        *(Matrix *)place = matrix_load(rows, cols, &s, m->n_threads);
        return;
    }
    float *values = alloc((size_t)cols, sizeof *values, t->name), *out = alloc((size_t)cols, sizeof *out, t->name);
    source_floats(&s, 0, cols, values);
    for (int i = 0; i < cols; i++) out[i] = values[source_row(&s, i)];
    free(values);
    *(const float **)place = out;
}

// What follows from the tensors, when all are there.
static void model_complete(Model *m) {
    m->tied = !m->output.panels;
    if (m->tied) m->output = m->embed;
    EACH_TENSOR(m, t, l) {
        const Matrix *w = tensor_matrix(m, t, l);
        m->any_quantized |= w && is_quantized(w->type);
        m->any_bf16 |= w && w->type == BF16;
    }
    rope_prepare(m);
}

static void model_free(Model *m) {
    bool mapped = m->file.data != NULL; // then the matrices lie in the file
    if (m->tied) m->output = (Matrix){0};
    EACH_TENSOR(m, t, l) {
        Matrix *w = tensor_matrix(m, t, l);
        if (!w) free(*(void **)tensor_field(m, t, l));
        else if (!mapped) matrix_free(w);
    }
    unmap_file(&m->file);
    free(m->rope_freqs);
    free(m->layers);
    free(m);
}

// ---------------------------------------------------------------------------------------------------------------------
// §13 GGUF
//
// The format of the llama.cpp world, versions 2 and 3: metadata as keys and values, then tensors with names.
//
//   "GGUF", uint32 version, uint64 n_tensors, uint64 n_keys
//   n_keys times:     string key, uint32 type, value          a string is a uint64 length and bytes;
//   n_tensors times:  string name, uint32 n_dims, uint64 dims[n_dims] (columns first), uint32 format, uint64 offset
//   zeros up to a multiple of general.alignment (32 unless said); then the data, to which the offsets count
//
// An array value is a uint32 type, a uint64 length and the elements. Ref: the GGUF specification in ggml's docs.
//
// A FLAT CHECKPOINT is a GGUF file whose matrices lie in panels, as bytes: the model points into the mapped file, and
// nothing is left to load. doc/formats.md has it byte by byte.

typedef enum { G_U8, G_I8, G_U16, G_I16, G_U32, G_I32, G_F32, G_BOOL, G_STRING, G_ARRAY, G_U64, G_I64, G_F64 } GgufType;

typedef struct {
    String name;
    GgufType type, element; // element: of an array
    uint64_t n;             // elements of an array, else 1
    size_t pos, end;        // of the value in the file
} GgufKey;

typedef struct {
    String name;
    const Format *format; // NULL: a matrix in panels,
    Matrix matrix;        // this one,
    int rows, cols;       // a vector has one row
    unsigned long long offset;
    const uint8_t *data;
    size_t bytes;
    bool used;
} GgufTensor;

typedef struct {
    const Mapping *file;
    int version;
    bool flat;
    String arch;
    int n_keys, n_tensors;
    GgufKey *keys;       // sorted by name
    GgufTensor *tensors; // sorted by name
} Gguf;

enum { FLAT_VERSION = 2, FLAT_ALIGNMENT = 64, FLAT_FORMAT = 24 }; // 24: bytes, GGML's type I8

static String reader_string(Reader *r, const char *what) {
    uint64_t len = reader_u64(r, what);
    return (String){(const char *)reader_take(r, len, what), len};
}

static String reader_name(Reader *r, const char *what) {
    String name = reader_string(r, what);
    if (name.len > 65535) die("%s: %s: expected at most 65535 bytes, got %zu", r->path, what, name.len);
    return name;
}

// A count of things that take at least `least` bytes each, so that there cannot be more than fit in the file.
static uint64_t reader_count(Reader *r, size_t least, const char *what) {
    size_t at = r->pos;
    uint64_t n = reader_u64(r, what);
    if (n > (r->size - r->pos) / least || n > INT_MAX)
        die("%s: %s at offset %zu: expected at most %zu, as the file has %zu bytes, got %llu", r->path, what, at,
            (r->size - r->pos) / least, r->size, (unsigned long long)n);
    return n;
}

// The order of keys, and of tensors: both begin with their names.
static int compare_names(const void *a, const void *b) {
    const String *x = a, *y = b;
    int order = memcmp(x->text, y->text, x->len < y->len ? x->len : y->len);
    return order ? order : (x->len > y->len) - (x->len < y->len);
}

static int compare_offsets(const void *a, const void *b) {
    const uint8_t *x = ((const GgufTensor *)a)->data, *y = ((const GgufTensor *)b)->data;
    return (x > y) - (x < y);
}

// Sort keys or tensors by name. None may be there twice.
static void sort_by_name(const char *path, const char *kind, void *array, int n, size_t size) {
    qsort(array, (size_t)n, size, compare_names);
    for (char *at = (char *)array + size; at < (char *)array + (size_t)n * size; at += size)
        if (!compare_names(at - size, at)) die_about(path, kind, *(String *)at, "is there twice");
}

static void *find_by_name(const char *name, const void *array, int n, size_t size) {
    String wanted = {name, strlen(name)};
    return n ? bsearch(&wanted, array, (size_t)n, size, compare_names) : NULL;
}

// --- keys

// Bytes of a value of fixed size; 0 for strings, arrays and unknown types.
static size_t gguf_type_bytes(uint32_t type) {
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof bytes ? bytes[type] : 0;
}

static void gguf_skip_value(Reader *r, String key, uint32_t type, uint64_t n) {
    if (type == G_STRING)
        for (uint64_t i = 0; i < n; i++) reader_string(r, "a string value");
    else if (!gguf_type_bytes(type)) die_about(r->path, "key", key, "expected a value type of GGUF, got %u", type);
    else reader_take(r, product(n, gguf_type_bytes(type), "a GGUF value"), "a value");
}

static void gguf_read_keys(Gguf *g, Reader *r) {
    g->keys = alloc((size_t)g->n_keys, sizeof *g->keys, "GGUF keys");
    for (GgufKey *k = g->keys; k < g->keys + g->n_keys; k++) {
        k->name = reader_name(r, "name of a key");
        uint32_t type = reader_u32(r, "type of a value"), element = type;
        k->n = 1;
        if (type == G_ARRAY) {
            element = reader_u32(r, "type of an array");
            k->n = reader_count(r, element == G_STRING ? 8 : 1, "length of an array");
        }
        k->type = (GgufType)type;
        k->element = (GgufType)element;
        k->pos = r->pos;
        gguf_skip_value(r, k->name, element, k->n);
        k->end = r->pos;
    }
    sort_by_name(r->path, "key", g->keys, g->n_keys, sizeof *g->keys);
}

// The key of this name. One that begins with a dot belongs to the architecture, as "llama.context_length".
static const GgufKey *gguf_find(const Gguf *g, const char *key) {
    char name[160];
    snprintf(name, sizeof name, "%.*s%s", *key == '.' ? shown(g->arch) : 0, g->arch.text, key);
    return find_by_name(name, g->keys, g->n_keys, sizeof *g->keys);
}

// A number of any type, or `otherwise` where the key is missing.
static double gguf_number(const Gguf *g, const char *key, double otherwise) {
    const GgufKey *k = gguf_find(g, key);
    if (!k) return otherwise;
    size_t n = gguf_type_bytes(k->type);
    uint64_t bits = 0; // little-endian: the low bytes
    double number;
    memcpy(&bits, g->file->data + k->pos, n);
    memcpy(&number, &bits, sizeof number);
    switch (k->type) {
    case G_F64: return number;
    case G_F32: return (double)float_from_bits((uint32_t)bits);
    case G_I8:
    case G_I16:
    case G_I32:
    case G_I64: return (double)((int64_t)(bits << (64 - 8 * n)) >> (64 - 8 * n)); // the sign fills what is above
    case G_STRING:
    case G_ARRAY: die_about(g->file->path, "key", k->name, "expected a number");
    default: return (double)bits;
    }
}

// A whole number in the range of int; missing: `otherwise`.
static int gguf_int(const Gguf *g, const char *key, int otherwise) {
    double x = gguf_number(g, key, otherwise);
    if (!(x >= INT_MIN && x <= INT_MAX) || x != floor(x))
        die_about(g->file->path, "key", gguf_find(g, key)->name, "expected a whole number of 31 bits, got %g", x);
    return (int)x;
}

static String gguf_string(const Gguf *g, const char *key) {
    const GgufKey *k = gguf_find(g, key);
    if (!k) return (String){"", 0};
    if (k->type != G_STRING) die_about(g->file->path, "key", k->name, "expected a string");
    Reader r = {g->file->path, g->file->data, g->file->size, k->pos};
    return reader_string(&r, key);
}

// A Reader of the elements of an array of this element type, and their number; 0 where the key is missing.
static uint64_t gguf_array(const Gguf *g, const char *key, GgufType element, Reader *r) {
    const GgufKey *k = gguf_find(g, key);
    *r = (Reader){g->file->path, g->file->data, k ? k->end : 0, k ? k->pos : 0};
    if (!k) return 0;
    if (k->type != G_ARRAY || k->element != element)
        die_about(r->path, "key", k->name, "expected an array of type %d, got type %d of %d", element, k->type,
                  k->element);
    return k->n;
}

// --- tensors

// Whether the numbers that describe a matrix, each in its range, go together.
static bool matrix_sound(const Matrix *w) {
    const bool small = type_bits(w->type) < 8;
    if (!is_quantized(w->type))
        return w->cols % step_columns(w->type) == 0 && !w->group && !w->scaling && !w->zero && !w->has_min;
    if (!w->group || w->group % types[w->type].sum || w->cols % w->group || (small && w->cols % BLOCK)) return false;
    const int superblock = scale_layout(w).superblock;
    if (superblock % w->group || w->cols % superblock) return false;
    if (w->zero & (w->zero - 1) || (w->zero && (!small || types[w->type].values))) return false;
    return w->scaling == SCALE_POWER ? !w->has_min : w->scaling != SCALE_NIBBLES || w->has_min;
}

// The next matrix of a flat checkpoint, from its list; where it lies is not known yet.
static void flat_matrix(GgufTensor *t, Reader *list) {
    enum { TYPE, ROWS, COLS, GROUP, SCALING, ZERO, HAS_MIN, N_FIELDS };
    static const int least[] = {0, 1, 1, 0, 0, 0, 0};
    static const int most[] = {U8 - 1, 1 << 24, 1 << 24, 1 << 24, N_SCALINGS - 1, 32, 1};
    int n[N_FIELDS];
    bool sound = true;
    if (list->size - list->pos < sizeof n)
        die_about(list->path, "tensor", t->name, "key run.flat.matrices: expected %d numbers for it, got none",
                  N_FIELDS);
    for (int i = 0; i < N_FIELDS; i++) {
        n[i] = reader_i32(list, "run.flat.matrices");
        sound = sound && n[i] >= least[i] && n[i] <= most[i];
    }
    Matrix w = {(Type)n[TYPE], n[ROWS], n[COLS], NULL, NULL, (Scaling)n[SCALING], n[GROUP], n[ZERO], n[HAS_MIN]};
    if (!sound || !matrix_sound(&w))
        die_about(list->path, "tensor", t->name,
                  "type %d, shape [%d, %d], group %d, scaling %d, zero %d and minima %d do not go together", n[TYPE],
                  n[ROWS], n[COLS], n[GROUP], n[SCALING], n[ZERO], n[HAS_MIN]);
    t->rows = n[ROWS];
    t->cols = n[COLS];
    t->matrix = w;
    t->bytes = matrix_bytes(&w);
}

// Shape and size of a matrix or vector in rows, of a format known by its number.
static void row_tensor(GgufTensor *t, uint32_t id, const unsigned long long dims[4], const char *path) {
    unsigned long long most = 1 << 24;
    if (dims[2] != 1 || dims[3] != 1 || dims[0] < 1 || dims[0] > most || dims[1] < 1 || dims[1] > most)
        die_about(path, "tensor", t->name,
                  "expected a vector or matrix of at most 2^24 rows and columns, got [%llu, %llu, %llu, %llu]", dims[3],
                  dims[2], dims[1], dims[0]);
    t->cols = (int)dims[0];
    t->rows = (int)dims[1];
    t->format = format_by_id(id);
    Text known = {0};
    bool is_known = t->format && t->format->columns;
    for (int i = 0; i < N_FORMATS && !is_known; i++)
        if (formats[i].id >= 0 && formats[i].columns) text_format(&known, "%s%s", i ? " " : "", formats[i].name);
    if (!is_known)
        die_about(path, "tensor", t->name, "its format, number %u%s%s, is none of those this program knows (%.*s)", id,
                  t->format ? ", " : "", t->format ? t->format->name : "", (int)known.len, known.data);
    if (t->cols % t->format->columns)
        die_about(path, "tensor", t->name, "expected rows of whole %s blocks of %d, got rows of %d", t->format->name,
                  t->format->columns, t->cols);
    t->bytes = (size_t)t->rows * row_bytes(t->format, t->cols);
}

// Name, format, shape and offset of one tensor. list: what a flat checkpoint says of its matrices
static void gguf_read_tensor(const Gguf *g, GgufTensor *t, Reader *r, Reader *list) {
    t->name = reader_name(r, "name of a tensor");
    uint32_t n_dims = reader_u32(r, "dimensions of a tensor");
    unsigned long long dims[4] = {1, 1, 1, 1};
    if (n_dims < 1 || n_dims > 4) die_about(r->path, "tensor", t->name, "expected 1 to 4 dimensions, got %u", n_dims);
    for (uint32_t i = 0; i < n_dims; i++) dims[i] = reader_u64(r, "shape of a tensor");
    uint32_t id = reader_u32(r, "format of a tensor");
    if (!g->flat || id != FLAT_FORMAT) row_tensor(t, id, dims, r->path);
    else flat_matrix(t, list);
    if (!t->format && (dims[0] != t->bytes || n_dims > 1))
        die_about(r->path, "tensor", t->name, "expected %zu bytes of panels, got %llu", t->bytes, dims[0]);
    t->offset = reader_u64(r, "offset of a tensor");
}

// Where the tensors lie, and that they lie within the file and apart.
static void gguf_place_tensors(Gguf *g, const Reader *r) {
    int alignment = gguf_int(g, "general.alignment", 32);
    int least = g->flat ? FLAT_ALIGNMENT : 1, most = 1 << 20;
    if (alignment < least || alignment > most || (alignment & (alignment - 1)))
        die("%s: key general.alignment: expected a power of two from %d to %d, got %d", r->path, least, most,
            alignment);
    size_t begin = pad(r->pos, (size_t)alignment), room = begin < r->size ? r->size - begin : 0;
    for (GgufTensor *t = g->tensors; t < g->tensors + g->n_tensors; t++) {
        if (t->offset % (unsigned)alignment || t->offset > room || t->bytes > room - t->offset)
            die_about(r->path, "tensor", t->name,
                      "expected %zu bytes at a multiple of %d within the %zu bytes of data, got offset %llu: the file "
                      "is truncated or damaged",
                      t->bytes, alignment, room, t->offset);
        t->data = r->data + begin + t->offset;
        if (t->format) continue;
        Matrix *w = &t->matrix;
        w->panels = t->data;
        if (is_quantized(w->type)) w->scales = t->data + matrix_panels(w) * panel_words(w) * 4;
    }
    qsort(g->tensors, (size_t)g->n_tensors, sizeof *g->tensors, compare_offsets);
    for (int i = 1; i < g->n_tensors; i++) {
        const GgufTensor *a = &g->tensors[i - 1], *b = &g->tensors[i];
        if (a->data + a->bytes > b->data)
            die_about(r->path, "tensor", a->name, "overlaps with tensor %.*s", shown(b->name), b->name.text);
    }
    sort_by_name(r->path, "tensor", g->tensors, g->n_tensors, sizeof *g->tensors);
}

// The header of a file: all keys, all tensors, everything within bounds.
static Gguf *gguf_open(const Mapping *file) {
    Gguf *g = alloc(1, sizeof *g, "GGUF");
    Reader r = {file->path, file->data, file->size, 0};
    reader_take(&r, 4, "magic");
    uint32_t version = reader_u32(&r, "version");
    if (version == 2u << 24 || version == 3u << 24)
        die("%s: a big-endian GGUF file; expected a little-endian one", r.path);
    if (version != 2 && version != 3) die("%s: expected GGUF version 2 or 3, got %u", r.path, version);
    *g = (Gguf){.file = file, .version = (int)version, .arch = {"", 0}};
    g->n_tensors = (int)reader_count(&r, 24, "number of tensors");
    g->n_keys = (int)reader_count(&r, 12, "number of keys");
    gguf_read_keys(g, &r);
    g->arch = gguf_string(g, "general.architecture");
    int flat = gguf_int(g, "run.flat.version", 0);
    g->flat = gguf_find(g, "run.flat.version") != NULL;
    if (g->flat && flat != FLAT_VERSION)
        die("%s: key run.flat.version: expected %d, got %d (export.py writes a new file)", r.path, FLAT_VERSION, flat);
    Reader list;
    gguf_array(g, "run.flat.matrices", G_I32, &list);
    g->tensors = alloc((size_t)g->n_tensors, sizeof *g->tensors, "tensors");
    for (int i = 0; i < g->n_tensors; i++) gguf_read_tensor(g, &g->tensors[i], &r, &list);
    if (list.pos < list.size)
        die("%s: key run.flat.matrices: expected as many as the file has, got %zu bytes more", r.path,
            list.size - list.pos);
    gguf_place_tensors(g, &r);
    return g;
}

static void gguf_free(Gguf *g) {
    if (!g) return;
    free(g->keys);
    free(g->tensors);
    free(g);
}

// The tensor of this name, marked as used, or NULL.
static GgufTensor *gguf_tensor(Gguf *g, const char *name) {
    GgufTensor *t = find_by_name(name, g->tensors, g->n_tensors, sizeof *g->tensors);
    if (t) t->used = true;
    return t;
}

// --- a model

static void gguf_rope(Gguf *g, Config *c) {
    c->rope_base = gguf_number(g, ".rope.freq_base", 10000);
    c->rope_factor = gguf_number(g, ".rope.scaling.factor", gguf_number(g, ".rope.scale_linear", 1));
    c->rope_n_ctx = gguf_int(g, ".rope.scaling.original_context_length", c->n_ctx_train);
    String type = gguf_string(g, ".rope.scaling.type");
    if (string_is(type, "linear") || (!type.len && c->rope_factor != 1)) c->rope_scaling = ROPE_LINEAR;
    else if (string_is(type, "yarn")) c->rope_scaling = ROPE_YARN;
    else if (string_is(type, "llama3") && !gguf_tensor(g, "rope_freqs.weight"))
        die("%s: RoPE is scaled as in Llama 3, but tensor rope_freqs.weight is missing", g->file->path);
    else if (type.len && !string_is(type, "none") && !string_is(type, "llama3"))
        die_about(g->file->path, "key", gguf_find(g, ".rope.scaling.type")->name,
                  "expected none, linear, llama3 or yarn, got %.*s", shown(type), type.text);
    const struct {
        const char *key;
        double only;
    } fixed[] = {{".rope.scaling.attn_factor", 1},
                 {".rope.scaling.yarn_attn_factor", 1},
                 {".rope.scaling.yarn_ext_factor", 1},
                 {".rope.scaling.yarn_beta_fast", 32},
                 {".rope.scaling.yarn_beta_slow", 1},
                 {".attention.scale", 0},
                 {".final_logit_softcapping", 0},
                 {".attn_logit_softcapping", 0},
                 {".logit_scale", 0},
                 {".expert_count", 0},
                 {".rope.dimension_count", c->head_dim},
                 {".attention.value_length", c->head_dim}};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++) {
        double got = gguf_number(g, fixed[i].key, fixed[i].only);
        if (got != fixed[i].only)
            die_about(g->file->path, "key", gguf_find(g, fixed[i].key)->name, "only %g is supported, got %g",
                      fixed[i].only, got);
    }
}

// The hyperparameters, from the metadata, all but the size of the vocabulary.
static Config gguf_config(Gguf *g) {
    Config c = {.rope_factor = 1};
    for (int i = 0; i < N_HYPERPARAMETERS; i++)
        if (hyperparameters[i].key) *hyperparameter(&c, i) = gguf_int(g, hyperparameters[i].key, 0);
    if (!gguf_find(g, ".attention.head_count_kv")) c.n_kv_heads = c.n_heads;
    if (!gguf_find(g, ".attention.key_length")) c.head_dim = c.n_heads > 0 ? c.dim / c.n_heads : 0;
    c.norm_eps = (float)gguf_number(g, ".attention.layer_norm_rms_epsilon", 1e-5);
    gguf_rope(g, &c);
    return c;
}

// A row of the table from the file. layer < 0: not of a layer.
static void gguf_load_tensor(Model *m, Gguf *g, const Tensor *t, int layer, bool turns_halves) {
    char name[160];
    if (layer < 0) snprintf(name, sizeof name, "%s", t->name);
    else snprintf(name, sizeof name, "blk.%d.%s", layer, t->name);
    const GgufTensor *found = gguf_tensor(g, name);
    if (!found && t->flags & OPTIONAL) return;
    if (!found) die("%s: tensor %s is missing", g->file->path, name);
    int rows = dim_of(&m->config, t->rows), cols = dim_of(&m->config, t->cols);
    if (found->rows != rows || found->cols != cols)
        die_about(g->file->path, "tensor", found->name, "expected [%d, %d], got [%d, %d]", rows, cols, found->rows,
                  found->cols);
    bool flat = g->flat && t->rows != VECTOR;
    if (g->flat && found->format != (flat ? NULL : FORMAT_F32))
        die_about(g->file->path, "tensor", found->name, "expected %s in a flat checkpoint, got %s",
                  flat ? "panels" : "F32", found->format ? found->format->name : "panels");
    if (flat) *(Matrix *)tensor_field(m, t, layer) = found->matrix;
    else {
        tensor_load(m, t, layer, (Source){.format = found->format, .weights = found->data}, turns_halves && !g->flat);
        mapping_release(g->file, found->data, found->bytes);
    }
}

static const Architecture *gguf_architecture(const Gguf *g) {
    Text known = {0};
    for (int i = 0; i < N_ARCHITECTURES; i++)
        if (string_is(g->arch, architectures[i].name)) return &architectures[i];
    for (int i = 0; i < N_ARCHITECTURES; i++) text_format(&known, "%s%s", i ? ", " : "", architectures[i].name);
    die("%s: this GGUF file's architecture: expected one of %.*s, got '%.*s'", g->file->path, (int)known.len,
        known.data, shown(g->arch), g->arch.text);
}

static void gguf_load(Model *m, Gguf *g) {
    bool turns_halves = gguf_architecture(g)->turns_halves;
    Config *c = &m->config;
    *c = gguf_config(g);
    String name = gguf_string(g, "general.name");
    snprintf(m->name, sizeof m->name, "%.*s", shown(name), name.text);
    const GgufTensor *embed = gguf_tensor(g, "token_embd.weight");
    if (!embed) die("%s: tensor token_embd.weight is missing: a vocabulary without a model?", g->file->path);
    const GgufTensor *gate = gguf_tensor(g, "blk.0.ffn_gate.weight"), *first = gate ? gate : embed;
    const char *type = first->format ? first->format->name : type_name(first->matrix.type);
    snprintf(m->format, sizeof m->format, "%sGGUF version %d, %s", g->flat ? "flat checkpoint, " : "", g->version,
             type);
    c->vocab_size = embed->rows;
    config_check(c, g->file->path, "GGUF model");
    m->layers = alloc((size_t)c->n_layers, sizeof *m->layers, "layers");
    double start = seconds();
    for (int l = -1; l < c->n_layers; l++) {
        for (const Tensor *t = tensors; t < tensors + N_TENSORS; t++)
            if (t->in_layer == (l >= 0)) gguf_load_tensor(m, g, t, l, turns_halves);
        show_progress("loading, layers", l + 1, c->n_layers, start);
    }
    for (int i = 0; i < g->n_tensors; i++)
        if (!g->tensors[i].used)
            die_about(g->file->path, "tensor", g->tensors[i].name, "has no place in this architecture");
}

// ---------------------------------------------------------------------------------------------------------------------
// §14 llama2.c
//
// The checkpoints of llama2.c, versions 0, 1 and 2; and how to tell what a file is.
//
//   version 0   7 int32 (below); float32 tensors. A negative vocab_size says that the classifier is separate. After the
//               final norm lie two tables of RoPE values, which are skipped.
//   version 1   "ak42" (uint32), 1, 7 int32, uint8 shared_classifier, zeros to byte 256; norms first, then matrices.
//   version 2   as version 1 with 2, and an int32 group_size after shared_classifier; norms float32, then for each
//               matrix its int8 values and after them one float32 scale for every group_size values.
//
//   the 7:      dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, context length

enum { LLAMA2C_HEADER = 256, LLAMA2C_TENSORS = 12 };

typedef struct {
    int version, group_size, n_tensors;
    size_t rope_bytes; // of version 0's RoPE values
} Llama2c;

// The tensors in the order of the file: of version 0, and of the others. Of a tensor in every layer all lie together.
static const char *const llama2c_order[2][LLAMA2C_TENSORS] = {
    {"token_embd.weight", "attn_norm.weight", "attn_q.weight", "attn_k.weight", "attn_v.weight", "attn_output.weight",
     "ffn_norm.weight", "ffn_gate.weight", "ffn_down.weight", "ffn_up.weight", "output_norm.weight", "output.weight"},
    {"attn_norm.weight", "ffn_norm.weight", "output_norm.weight", "token_embd.weight", "attn_q.weight", "attn_k.weight",
     "attn_v.weight", "attn_output.weight", "ffn_gate.weight", "ffn_down.weight", "ffn_up.weight", "output.weight"}};

static const Tensor *tensor_of_name(const char *name) {
    const Tensor *t = tensors;
    while (strcmp(t->name, name)) t++;
    return t;
}

static Config llama2c_header(Reader *r, Llama2c *h) {
    *h = (Llama2c){0};
    if (r->size >= 4 && !memcmp(r->data, "24ka", 4)) { // the uint32 "ak42", lowest byte first
        reader_i32(r, "magic");
        h->version = reader_i32(r, "version");
        if (h->version < 1 || h->version > 2)
            die("%s: expected a llama2.c checkpoint of version 0, 1 or 2, got version %d", r->path, h->version);
    }
    Config c = {.norm_eps = 1e-5f, .rope_base = 10000, .rope_factor = 1};
    int *fields[] = {&c.dim, &c.hidden_dim, &c.n_layers, &c.n_heads, &c.n_kv_heads, &c.vocab_size, &c.n_ctx_train};
    for (int i = 0; i < 7; i++) *fields[i] = reader_i32(r, "hyperparameters");
    c.rope_n_ctx = c.n_ctx_train;
    bool shared_classifier = h->version ? *reader_take(r, 1, "shared_classifier") : c.vocab_size > 0;
    if (h->version == 0 && c.vocab_size < 0) c.vocab_size = c.vocab_size == INT_MIN ? 0 : -c.vocab_size;
    if (h->version == 2) {
        h->group_size = reader_i32(r, "group_size");
        if (h->group_size < 1) die("%s: header: expected a positive group_size, got %d", r->path, h->group_size);
    }
    if (h->version >= 1) reader_take(r, LLAMA2C_HEADER - r->pos, "header");
    c.head_dim = c.n_heads > 0 ? c.dim / c.n_heads : 0;
    config_check(&c, r->path, h->version ? "llama2.c checkpoint" : "llama2.c checkpoint, and of no other known format");
    if (c.dim % c.n_heads)
        die("%s: header: expected dim to be a multiple of n_heads, got %d and %d", r->path, c.dim, c.n_heads);
    h->n_tensors = LLAMA2C_TENSORS - shared_classifier;
    if (h->version == 0) h->rope_bytes = (size_t)c.n_ctx_train * (size_t)(c.head_dim / 2) * 2 * 4;
    return c;
}

// Bytes of the values of a tensor, and of the scales after them. Nothing overflows: config_check bounds the fields.
static size_t llama2c_bytes(const Model *m, const Llama2c *h, const Tensor *t, size_t *scales) {
    size_t n = (size_t)dim_of(&m->config, t->rows) * (size_t)dim_of(&m->config, t->cols);
    bool int8 = h->version == 2 && t->rows != VECTOR;
    if (int8 && n % (size_t)h->group_size)
        die("%s: tensor %s: its %zu values are not a multiple of the group size %d", m->path, t->name, n,
            h->group_size);
    *scales = int8 ? n / (size_t)h->group_size * 4 : 0;
    return int8 ? n : n * 4;
}

// The exact size of a checkpoint, from its header alone.
static size_t llama2c_size(const Model *m, const Llama2c *h) {
    size_t bytes = (h->version == 0 ? 28 : LLAMA2C_HEADER) + h->rope_bytes, scales;
    for (int i = 0; i < h->n_tensors; i++) {
        const Tensor *t = tensor_of_name(llama2c_order[h->version > 0][i]);
        size_t values = llama2c_bytes(m, h, t, &scales);
        bytes += (size_t)tensor_copies(m, t) * (values + scales);
    }
    return bytes;
}

static void llama2c_load(Model *m, const Mapping *file) {
    Reader reader = {file->path, file->data, file->size, 0}, *r = &reader;
    Llama2c h;
    m->config = llama2c_header(r, &h);
    snprintf(m->format, sizeof m->format, "llama2.c version %d (%s)", h.version, h.version == 2 ? "int8" : "float32");
    size_t expected = llama2c_size(m, &h), n_scales;
    if (r->size != expected)
        die("%s: %s: expected %zu bytes from the header, got a file of %zu bytes", r->path, m->format, expected,
            r->size);
    m->counts_prompt = true;
    m->layers = alloc((size_t)m->config.n_layers, sizeof *m->layers, "layers");
    for (int i = 0; i < h.n_tensors; i++) {
        const Tensor *t = tensor_of_name(llama2c_order[h.version > 0][i]);
        if (i == LLAMA2C_TENSORS - 1) reader_take(r, h.rope_bytes, "RoPE values"); // the classifier is after them
        for (int l = 0; l < tensor_copies(m, t); l++) {
            size_t n = llama2c_bytes(m, &h, t, &n_scales);
            Source s = {.format = n_scales ? FORMAT_INT8 : FORMAT_F32, .weights = reader_take(r, n, t->name)};
            s.scales = n_scales ? reader_take(r, n_scales, t->name) : NULL;
            s.group = (size_t)h.group_size;
            tensor_load(m, t, l, s, false);
            mapping_release(file, s.weights, n + n_scales);
        }
    }
}

// --- any checkpoint

// An open file, recognised by its first bytes. It stays where it is allocated: its Gguf points to it.
typedef struct {
    Mapping file;
    Gguf *gguf; // or NULL: llama2.c's
    bool kept;  // a model lies in the file, which stays mapped as long as that
} Checkpoint;

// Formats that people try and this program does not read are refused by name, each with the way out.
static Checkpoint *checkpoint_open(const char *path) {
    static const struct {
        size_t offset;
        const char *magic, *name;
    } others[] = {{0, "24ka\3",
                   "a flat checkpoint of version 3, which is no longer read; make a new one of its source "
                   "(export.py model.flat.gguf --from SOURCE)"},
                  {0, "PK\3\4", "a PyTorch or zip file; export.py makes a model.flat.gguf of it"},
                  {0, "tjgg", "an old GGML file; convert it to GGUF first"},
                  {0, "lmgg", "an old GGML file; convert it to GGUF first"},
                  {8, "{\"", "a safetensors file; export.py makes a model.flat.gguf of its folder"}};
    Checkpoint *c = alloc(1, sizeof *c, "checkpoint");
    c->file = map_file(path);
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t at = others[i].offset, n = strlen(others[i].magic);
        if (c->file.size >= at + n && !memcmp(c->file.data + at, others[i].magic, n))
            die("%s: this is %s", path, others[i].name);
    }
    if (c->file.size >= 4 && !memcmp(c->file.data, "GGUF", 4)) c->gguf = gguf_open(&c->file);
    return c;
}

static void checkpoint_close(Checkpoint *c) {
    gguf_free(c->gguf);
    if (!c->kept) unmap_file(&c->file);
    free(c);
}

static Model *model_load(Checkpoint *checkpoint, int n_threads) {
    Model *m = alloc(1, sizeof *m, "model");
    m->path = checkpoint->file.path;
    m->n_threads = n_threads;
    if (checkpoint->gguf) gguf_load(m, checkpoint->gguf);
    else llama2c_load(m, &checkpoint->file);
    checkpoint->kept = checkpoint->gguf && checkpoint->gguf->flat;
    if (checkpoint->kept) m->file = checkpoint->file;
    model_complete(m);
    return m;
}

// ---------------------------------------------------------------------------------------------------------------------
// §15 Vocabularies
//
// Where the pieces come from: llama2.c's tokenizer.bin, or the metadata of a GGUF file, flat or not.

// llama2.c's tokenizer.bin: int32 longest piece, then for each id float32 score, int32 length, bytes; to the end of the
// file. Ids 0, 1, 2 are <unk>, <s>, </s>.
static void tokenizer_read_llama2c(Tokenizer *t, const Mapping *file) {
    Reader r = {file->path, file->data, file->size, 0};
    int longest = reader_i32(&r, "longest piece");
    size_t most = (r.size - r.pos) / 8;
    if (most > INT_MAX / 4) die("%s: too large for a tokenizer: %zu bytes", r.path, r.size);
    t->pieces = alloc(most, sizeof *t->pieces, "vocabulary");
    t->text = alloc(r.size, 1, "vocabulary");
    char *text = t->text;
    for (; r.pos < r.size; t->n_pieces++) {
        float score = reader_f32(&r, "score of a piece");
        int len = reader_i32(&r, "length of a piece");
        if (len < 0 || len > longest)
            die("%s: not a tokenizer.bin: piece %d at offset %zu: expected a length of at most %d, got %d", r.path,
                t->n_pieces, r.pos - 4, longest, len);
        if (isnan(score)) die("%s: piece %d at offset %zu: its score is not a number", r.path, t->n_pieces, r.pos - 8);
        memcpy(text, reader_take(&r, (size_t)len, "a piece"), (size_t)len);
        PieceType type = t->n_pieces == 0 ? UNKNOWN_PIECE : t->n_pieces <= 2 ? CONTROL_PIECE : NORMAL_PIECE;
        if (type == NORMAL_PIECE && byte_of_piece(text, len) >= 0) type = BYTE_PIECE;
        t->pieces[t->n_pieces] = (Piece){text, len, score, type};
        text += len;
    }
    if (t->n_pieces < 3) die("%s: expected at least the pieces <unk>, <s> and </s>, got %d", r.path, t->n_pieces);
    snprintf(t->model, sizeof t->model, "llama");
    t->bos = 1;
    t->unknown = 0;
    t->add_bos = true;
    tokenizer_add_stop(t, 1); // llama2.c's models end a text by beginning the next one
    tokenizer_add_stop(t, 2);
    tokenizer_index(t);
    t->space_prefix = tokenizer_find(t, " ", 1) >= 0;
}

// --- GGUF

// Byte-level vocabularies write each byte as a printable character: itself where it is one, else one from U+0100 on, in
// order. The byte of such a character, or -1.
static int byte_of_character(uint32_t c) {
    static const uint8_t first[] = {'!', 0xA1, 0xAE}, last[] = {'~', 0xAC, 0xFF};
    for (int i = 0; i < 3; i++)
        if (c >= first[i] && c <= last[i]) return (int)c;
    if (c < 0x100 || c > 0x143) return -1;
    int n = (int)c - 0x100; // 33 controls and the space, then DEL to U+00A0, then the soft hyphen
    return n < 33 ? n : n < 67 ? n - 33 + 0x7F : 0xAD;
}

// The bytes that a piece of a byte-level vocabulary stands for; as it is where it is not written that way.
static int raw_bytes(const char *text, size_t n, char *out) {
    int len = 0;
    for (size_t i = 0; i < n;) {
        int size = utf8_scan(text + i, n - i), byte = size > 0 ? byte_of_character(utf8_decode(text + i, size)) : -1;
        if (byte < 0) {
            memcpy(out, text, n);
            return (int)n;
        }
        out[len++] = (char)byte;
        i += (size_t)size;
    }
    return len;
}

// The merges, "left right" each, of a byte-level vocabulary.
static void gguf_read_merges(Tokenizer *t, const Gguf *g) {
    Reader r;
    uint64_t n = gguf_array(g, "tokenizer.ggml.merges", G_STRING, &r);
    char *bytes = alloc(r.size - r.pos, 1, "merges");
    merges_open(t, (uint32_t)n);
    for (int rank = 0; rank < (int)n; rank++) {
        String s = reader_string(&r, "a merge");
        const char *space = s.len > 1 && s.len < 1 << 16 ? memchr(s.text + 1, ' ', s.len - 1) : NULL;
        if (!space)
            die("%s: merge %d: expected two pieces with a space between, got '%.*s'", r.path, rank, shown(s), s.text);
        size_t split = (size_t)(space - s.text);
        int left = tokenizer_find(t, bytes, (size_t)raw_bytes(s.text, split, bytes));
        int right = tokenizer_find(t, bytes, (size_t)raw_bytes(space + 1, s.len - split - 1, bytes));
        int joined = raw_bytes(s.text, split, bytes);
        joined += raw_bytes(space + 1, s.len - split - 1, bytes + joined);
        if (tokenizer_find(t, bytes, (size_t)joined) >= 0) merges_add(t, left, right, rank);
    }
    free(bytes);
}

// Texts, scores and types of all pieces.
static void gguf_read_pieces(Tokenizer *t, const Gguf *g, bool byte_level) {
    Reader tokens, scores, kinds;
    uint64_t n = gguf_array(g, "tokenizer.ggml.tokens", G_STRING, &tokens);
    uint64_t n_scores = gguf_array(g, "tokenizer.ggml.scores", G_F32, &scores);
    uint64_t n_types = gguf_array(g, "tokenizer.ggml.token_type", G_I32, &kinds);
    if (n < 1 || n > 1 << 24)
        die("%s: tokenizer.ggml.tokens: expected 1 to 2^24 pieces, got %llu", tokens.path, (unsigned long long)n);
    if ((n_scores && n_scores != n) || (n_types && n_types != n))
        die("%s: tokenizer: expected as many scores and types as pieces, %llu, got %llu and %llu", tokens.path,
            (unsigned long long)n, (unsigned long long)n_scores, (unsigned long long)n_types);
    t->n_pieces = (int)n;
    t->pieces = alloc(n, sizeof *t->pieces, "vocabulary");
    t->text = alloc(tokens.size - tokens.pos, 1, "vocabulary");
    char *out = t->text;
    for (int i = 0; i < t->n_pieces; i++) {
        String s = reader_string(&tokens, "a piece");
        if (s.len > INT_MAX / 16) die("%s: piece %d has %zu bytes", tokens.path, i, s.len);
        float score = n_scores ? reader_f32(&scores, "scores") : 0;
        int type = n_types ? reader_i32(&kinds, "types of pieces") : NORMAL_PIECE;
        if (isnan(score)) die("%s: piece %d: its score is not a number", tokens.path, i);
        int len = (int)s.len;
        if (type == NORMAL_PIECE && byte_level) len = raw_bytes(s.text, s.len, out);
        else if (!byte_level) len = unescape_spaces(s.text, s.len, out);
        else memcpy(out, s.text, s.len);
        t->pieces[i] = (Piece){out, len, score, (PieceType)type};
        out += len;
    }
}

// What ends a text: the ids that the file names, and pieces known to end a turn.
static void gguf_read_stops(Tokenizer *t, const Gguf *g) {
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    static const char *const names[] = {"<|eot_id|>",    "<|im_end|>",      "<|end|>",      "<|eom_id|>",
                                        "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"};
    for (int i = 0; i < 3; i++) tokenizer_add_stop(t, gguf_int(g, keys[i], -1));
    Reader more;
    uint64_t n = gguf_array(g, "run.tokenizer.stop_ids", G_I32, &more);
    for (uint64_t i = 0; i < n; i++) tokenizer_add_stop(t, reader_i32(&more, "stop ids"));
    for (int i = 0; i < t->n_specials; i++) {
        const Piece *p = &t->pieces[t->specials[i]];
        for (size_t j = 0; j < sizeof names / sizeof *names; j++)
            if (p->type == CONTROL_PIECE && string_is((String){p->text, (size_t)p->len}, names[j]))
                tokenizer_add_stop(t, t->specials[i]);
    }
}

// What `tokenizer.ggml.pre` may say.
static const struct {
    const char *name;
    Stage stages[MAX_STAGES];
    bool whole_words, add_bos;
} pre_tokenizers[] = {
    {"default", {PUNCTUATION, GPT2, NUMBERS, THREE_DIGITS}, false, false},
    {"gpt-2", {GPT2}, false, false},
    {"llama-bpe", {LLAMA3}, true, true},
    {"qwen2", {QWEN2}, false, false},
    {"deepseek-r1-qwen", {QWEN2}, false, false},
    {"smollm", {ONE_NUMBER, GPT2}, false, false},
    {"refact", {ONE_NUMBER, GPT2}, false, false},
    {"starcoder", {ONE_NUMBER, GPT2}, false, false},
    {"tekken", {TEKKEN}, true, true},
};

// The pre-tokenizer of a byte-level vocabulary. Returns whether such vocabularies begin a text with BOS where the file
// does not say.
static bool tokenizer_set_words(Tokenizer *t, String pre) {
    if (!pre.len) pre = (String){"default", 7};
    snprintf(t->pre, sizeof t->pre, "%.*s", shown(pre), pre.text);
    unicode_prepare();
    for (size_t i = 0; i < sizeof pre_tokenizers / sizeof *pre_tokenizers; i++) {
        if (!string_is(pre, pre_tokenizers[i].name)) continue;
        memcpy(t->stages, pre_tokenizers[i].stages, sizeof t->stages);
        t->whole_words = pre_tokenizers[i].whole_words;
        return pre_tokenizers[i].add_bos;
    }
    die("%s: tokenizer.ggml.pre: '%.*s' is no pre-tokenizer that this program knows", t->path, shown(pre), pre.text);
}

static void tokenizer_read_gguf(Tokenizer *t, const Gguf *g) {
    String model = gguf_string(g, "tokenizer.ggml.model"), pre = gguf_string(g, "tokenizer.ggml.pre");
    bool byte_level = string_is(model, "gpt2");
    if (!byte_level && !string_is(model, "llama"))
        die("%s: tokenizer.ggml.model: expected llama or gpt2, got '%.*s'", g->file->path, shown(model), model.text);
    snprintf(t->model, sizeof t->model, "%.*s", shown(model), model.text);
    gguf_read_pieces(t, g, byte_level);
    tokenizer_index(t);
    bool add_bos = byte_level ? tokenizer_set_words(t, pre) : true;
    if (byte_level) gguf_read_merges(t, g);
    t->bos = gguf_int(g, "tokenizer.ggml.bos_token_id", byte_level ? -1 : 1);
    t->unknown = gguf_int(g, "tokenizer.ggml.unknown_token_id", byte_level ? -1 : 0);
    t->add_bos = t->bos >= 0 && gguf_int(g, "tokenizer.ggml.add_bos_token", add_bos);
    t->space_prefix = !byte_level && gguf_int(g, "tokenizer.ggml.add_space_prefix", 1);
    t->escapes_space = !byte_level && !gguf_int(g, "run.tokenizer.plain_spaces", 0);
    t->single_prefix = gguf_int(g, "run.tokenizer.single_prefix", 0);
    if (t->bos >= t->n_pieces || t->unknown >= t->n_pieces)
        die("%s: tokenizer: expected ids below %d, got BOS %d and unknown %d", t->path, t->n_pieces, t->bos,
            t->unknown);
    gguf_read_stops(t, g);
    String chat = gguf_string(g, "tokenizer.chat_template");
    if (chat.len > 1 << 20)
        die("%s: tokenizer.chat_template: expected at most 1 MiB, got %zu bytes", g->file->path, chat.len);
    if (chat.len) t->chat_template = memcpy(alloc(chat.len + 1, 1, "chat template"), chat.text, chat.len);
}

// Whether a checkpoint brings its tokenizer.
static bool has_tokenizer(const Checkpoint *file) {
    return file->gguf && gguf_find(file->gguf, "tokenizer.ggml.tokens");
}

// The tokenizer of a GGUF file, or a llama2.c tokenizer.bin.
static Tokenizer *tokenizer_load(const Checkpoint *file) {
    Tokenizer *t = alloc(1, sizeof *t, "tokenizer");
    t->path = file->file.path;
    if (file->gguf) tokenizer_read_gguf(t, file->gguf);
    else tokenizer_read_llama2c(t, &file->file);
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// §16 Options
//
// Part III: what a user can ask for. One table says what an option is called, what it takes, where its value goes and
// what it is for. The command line (§27), its help and the requests of a batch (§24) read it, so none of them can
// forget an option, or take a value that another refuses. llama2.c's options keep their letters and meaning.

typedef struct {
    const char *checkpoint, *tokenizer, *prompt, *file, *output, *system, *session, *draft;
    Sampling sampling;
    double rope_factor;
    int mode, kv, on_full, rope_scaling, template; // which one of the words below; -1: none was given
    int n_tokens, context, threads, chunk, window, stride, batch, logprobs, lookup, n_draft;
    uint64_t seed;
    bool seed_given, no_bos, special, stats, json, think, no_think, echo, ignore_eos, unordered, resume, help, version;
    const char **stops;
    int n_stops;
} Options;

// The words that an option takes, and which is which.
enum { MODE_GENERATE, MODE_CHAT, MODE_TOKENIZE, MODE_INFO, MODE_PERPLEXITY, MODE_BATCH, MODE_BENCH, N_MODES };
enum { ON_FULL_STOP, ON_FULL_SLIDE };
static const char *const mode_words[] = {"generate", "chat", "tokenize", "info", "perplexity", "batch", "bench", NULL};
static const char *const kv_words[] = {"f32", "f16", "q8", NULL};
static const char *const on_full_words[] = {"stop", "slide", NULL};
static const char *const rope_words[] = {"linear", "ntk", "yarn", NULL};
static const char *const template_words[] = {"plain", "llama-2", "llama-3", "chatml", "mistral", "zephyr", NULL};

typedef enum { FLAG, TEXT, LIST, WORD, REAL, INTEGER, SEED } Kind;

typedef struct {
    const char *name;
    char letter; // or 0
    Kind kind;
    size_t offset;            // of the value in Options
    const char *argument;     // what the help calls the value
    double min, max;          // REAL, INTEGER
    const char *initial;      // the default, written as a user would
    const char *member;       // what a request calls it, or NULL
    const char *const *words; // WORD: those that it takes, then NULL
    const char *group;        // a heading in front of it, or NULL
    const char *help;         // %s: where the words go
} Option;

#define AT(field) offsetof(Options, field)
static const Option options[] = {
    {"mode", 'm', WORD, AT(mode), "MODE", 0, 0, "generate", .words = mode_words, .group = "What to do", .help = "%s"},
    {"prompt", 'i', TEXT, AT(prompt), "TEXT", .help = "the prompt, or the first message of a chat"},
    {"file", 'f', TEXT, AT(file), "FILE", .help = "read the prompt or text from FILE; - is standard input"},
    {"tokens", 'n', INTEGER, AT(n_tokens), "N", 0, INT_MAX, NULL, "max_tokens",
     .help = "new tokens at most; 0: until the context is full (256; chat 0)"},
    {"stop", 0, LIST, AT(stops), "TEXT", .help = "end before this text appears; may be repeated"},
    {"ignore-eos", 0, FLAG, AT(ignore_eos), .help = "go on after the token that ends a text"},
    {"tokenizer", 'z', TEXT, AT(tokenizer), "FILE", .help = "the tokenizer (the checkpoint's own, else tokenizer.bin)"},
    {"no-bos", 0, FLAG, AT(no_bos), .help = "do not begin with the BOS token"},
    {"special", 0, FLAG, AT(special), .help = "find special tokens such as <|im_start|> in the text"},
    {"temperature", 't', REAL, AT(sampling.temperature), "T", 0, 1e6, "1.0", "temperature", .group = "Sampling",
     .help = "0 takes the most likely token"},
    {"top-p", 'p', REAL, AT(sampling.top_p), "P", 0, 1, "0.9", "top_p",
     .help = "sample from the nucleus of mass P; 0 or 1: off"},
    {"top-k", 'k', INTEGER, AT(sampling.top_k), "K", 0, INT_MAX, "0", "top_k",
     .help = "sample from the K most likely; 0: off"},
    {"min-p", 0, REAL, AT(sampling.min_p), "P", 0, 1, "0", "min_p",
     .help = "drop tokens below P times the most likely one's probability"},
    {"repeat-penalty", 0, REAL, AT(sampling.repeat_penalty), "R", 1e-6, 1e6, "1.0", "repeat_penalty",
     .help = "above 1: make tokens of the text so far less likely"},
    {"seed", 's', SEED, AT(seed), "N", 0, 0, NULL, "seed", .help = "64-bit seed (from the clock; --stats shows it)"},
    {"context", 'c', INTEGER, AT(context), "N", 1, 1 << 26, .group = "Context",
     .help = "positions to keep (the model's, at most 4096)"},
    {"kv", 0, WORD, AT(kv), "TYPE", .words = kv_words, .help = "key/value cache: %s (f16, but f32 for f32 weights)"},
    {"on-full", 0, WORD, AT(on_full), "WHAT", 0, 0, "stop", .words = on_full_words,
     .help = "with a full context stop, or slide: drop the older half"},
    {"rope-scaling", 0, WORD, AT(rope_scaling), "HOW", .words = rope_words,
     .help = "stretch the context: %s (as the file says)"},
    {"rope-factor", 0, REAL, AT(rope_factor), "F", 1, 1e4, .help = "by how much --rope-scaling stretches it"},
    {"threads", 'j', INTEGER, AT(threads), "N", 1, 1024, .group = "Speed",
     .help = "threads (one for each physical core; one for tiny models)"},
    {"chunk", 0, INTEGER, AT(chunk), "N", 1, 1 << 16, "256", .help = "prompt tokens that are computed together"},
    {"lookup", 0, INTEGER, AT(lookup), "N", 0, MAX_DRAFT, "0",
     .help = "guess N tokens ahead from the text so far: the same text, faster"},
    {"draft", 0, TEXT, AT(draft), "MODEL", .help = "guess with a small model of the same vocabulary"},
    {"draft-tokens", 0, INTEGER, AT(n_draft), "N", 1, MAX_DRAFT, "4", .help = "with --draft: guess N tokens ahead"},
    {"system", 'y', TEXT, AT(system), "TEXT", .group = "Chat", .help = "the system prompt"},
    {"template", 0, WORD, AT(template), "NAME", .words = template_words, .help = "%s (the file's)"},
    {"session", 0, TEXT, AT(session), "FILE", .help = "go on with the conversation in FILE, where every turn is saved"},
    {"think", 0, FLAG, AT(think), .help = "Qwen 3 thinks before it answers (its default)"},
    {"no-think", 0, FLAG, AT(no_think), .help = "Qwen 3 answers at once"},
    {"batch", 'b', INTEGER, AT(batch), "N", 1, 4096, "16", .group = "Batch", .help = "sequences at once"},
    {"output", 'o', TEXT, AT(output), "FILE", .help = "where the results go (standard output)"},
    {"unordered", 0, FLAG, AT(unordered), .help = "results as they finish, not in the order of the input"},
    {"resume", 0, FLAG, AT(resume), .help = "go on with the --output of an interrupted run"},
    {"window", 0, INTEGER, AT(window), "N", 2, 1 << 26, .group = "Perplexity", .help = "tokens in a window (512)"},
    {"stride", 0, INTEGER, AT(stride), "N", 1, 1 << 26, .help = "tokens from window to window (half of it)"},
    {"json", 0, FLAG, AT(json), .group = "Output", .help = "generate, chat, bench: results as JSON"},
    {"logprobs", 0, INTEGER, AT(logprobs), "N", 0, 1000,
     .help = "score each token and the N likeliest (with --json, in a batch)"},
    {"echo", 0, FLAG, AT(echo), .help = "show and score the prompt, too (with --json, in a batch)"},
    {"stats", 0, FLAG, AT(stats), .help = "speed, memory and seed, on standard error"},
    {"help", 'h', FLAG, AT(help), .help = "this text"},
    {"version", 0, FLAG, AT(version), .help = "the version"},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

// The option that a member of a request sets, or NULL.
static const Option *option_of_member(const char *name) {
    for (const Option *o = options; o < options + N_OPTIONS; o++)
        if (o->member && !strcmp(o->member, name)) return o;
    return NULL;
}

// Which one of the words it is; -1: none of them.
static int word_index(const char *const *words, const char *word) {
    for (int i = 0; words[i]; i++)
        if (!strcmp(words[i], word)) return i;
    return -1;
}

// The words as a person would list them: f32, f16 or q8.
static void text_append_words(Text *out, const char *const *words) {
    for (int i = 0; words[i]; i++) text_format(out, "%s%s", i == 0 ? "" : words[i + 1] ? ", " : " or ", words[i]);
}

// Puts a value where it belongs. Numbers must be numbers from end to end, and in range. Returns false for a value that
// the option does not take.
static bool option_parse(Options *o, const Option *option, const char *value) {
    void *field = (char *)o + option->offset;
    const char *characters = option->kind == REAL ? "0123456789.+-eE" : "0123456789";
    bool plain = *value && !value[strspn(value, characters)]; // not 0x10, nan or a space in front
    char *end;
    double number = strtod(value, &end);
    bool good = plain && !*end && number >= option->min && number <= option->max;
    errno = 0;
    switch (option->kind) {
    case FLAG: *(bool *)field = true; return true;
    case TEXT: *(const char **)field = value; return true;
    case LIST:
        if (*value) o->stops[o->n_stops++] = value;
        return *value;
    case WORD: *(int *)field = word_index(option->words, value); return *(int *)field >= 0;
    case REAL: *(double *)field = number; return good;
    case INTEGER: *(int *)field = good ? (int)number : 0; return good;
    case SEED:
        *(uint64_t *)field = strtoull(value, NULL, 10);
        o->seed_given = true;
        return plain && !errno;
    }
    return false;
}

// Sets an option. Returns false and says why where the value makes no sense.
static bool option_set(Options *o, const Option *option, const char *value, Text *wrong) {
    static const char *const kinds[] = {[LIST] = "expected a text",
                                        [WORD] = "expected ",
                                        [REAL] = "expected a number from %g to %g",
                                        [INTEGER] = "expected a whole number from %.0f to %.0f",
                                        [SEED] = "expected a whole number from 0 to 2^64 - 1"};
    if (option_parse(o, option, value)) return true;
    text_format(wrong, kinds[option->kind], option->min, option->max);
    if (option->words) text_append_words(wrong, option->words);
    text_string(wrong, ", got '");
    text_string(wrong, value);
    text_string(wrong, "'");
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// §17 Threads
//
// How many threads to use: one for each physical core that this process may use. Two threads on one core share its
// arithmetic and only get in each other's way, and threads beyond a container's quota are stopped in mid-stride. Also
// how much memory was used. Both are asked of each operating system in its own way.

#ifdef __linux__
// Reads a small file of the kernel's in the manner of scanf. Returns how many values were there.
__attribute__((format(scanf, 2, 3))) static int scan_file(const char *path, const char *format, ...) {
    va_list values;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    va_start(values, format);
    int n = vfscanf(file, format, values);
    va_end(values);
    fclose(file);
    return n;
}

// Whole processors' worth of time that the control group `path` (as in /proc/self/cgroup) and those around it allow:
// cpu.max says "200000 100000" for two, or "max 100000".
static int cgroup_processors(char *path) {
    int allowed = INT_MAX;
    for (;;) {
        char name[640];
        long quota, period;
        snprintf(name, sizeof name, "/sys/fs/cgroup%s/cpu.max", path);
        if (scan_file(name, "%ld %ld", &quota, &period) == 2 && period > 0)
            allowed = min_int(allowed, max_int(1, (int)(quota / period)));
        char *slash = strrchr(path, '/');
        if (!slash) return allowed;
        *slash = 0;
    }
}

static int default_threads(void) {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return 1;
    int cores = 0;
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &allowed)) continue;
        char path[96]; // the list of the hardware threads of this core begins with its lowest: count each core there
        int lowest;
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        bool known = scan_file(path, "%d", &lowest) == 1 && lowest >= 0 && lowest < CPU_SETSIZE;
        if (!known || lowest == cpu || !CPU_ISSET(lowest, &allowed)) cores++;
    }
    char group[512] = "";
    if (scan_file("/proc/self/cgroup", "0::%511s", group) != 1) group[0] = 0; // the line of version 2 is "0::/path"
    return max_int(1, min_int(cores, cgroup_processors(group)));
}
#else
static int default_threads(void) { return max_int(1, (int)sysconf(_SC_NPROCESSORS_ONLN)); }
#endif

static int choose_threads(const Options *o) {
#ifndef _OPENMP
    return 1; // there is no other
#endif
    return o->threads ? o->threads : default_threads();
}

// The most memory that this process had at a time. (On Linux from /proc: what getrusage says there may be the peak of
// the process that started this one.)
static double peak_memory_mib(void) {
    FILE *status = fopen("/proc/self/status", "r");
    char line[256];
    double kib = 0;
    while (status && fgets(line, sizeof line, status))
        if (sscanf(line, "VmHWM: %lf", &kib) == 1) break;
    if (status) fclose(status);
    if (kib > 0) return kib / 1024;
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    return (double)usage.ru_maxrss / (1 << 20); // bytes on macOS
}

// ---------------------------------------------------------------------------------------------------------------------
// §18 Chat templates
//
// A chat model was trained on conversations in one written form, its template: marks around each message that say whose
// turn it is. Here messages go straight to ids. Marks are special pieces, put in by their ids; what a person wrote is
// ordinary text, and never searched for marks (nobody may end their turn and go on as somebody else).
//
// A file carries its template as a program in jinja2. That is a language of its own; we recognise the template by the
// marks in its text, and render it ourselves.

typedef enum { SYSTEM, USER, ASSISTANT } Role;

static const char *const role_names[] = {"system", "user", "assistant"};

typedef struct {
    Role role;
    char *text;
    size_t len;
} Message;

// In the order of template_words; and that of Mistral where [INST] is a special piece.
typedef enum { PLAIN_TEXT, LLAMA_2, LLAMA_3, CHATML, MISTRAL, ZEPHYR, MISTRAL_V3, N_FORMS } TemplateKind;
_Static_assert(sizeof template_words / sizeof *template_words == MISTRAL_V3 + 1, "a form for each word");

// How a turn is written. Braces hold {role}, {text}, {end} (the token that ends an answer), or a mark.
typedef struct {
    const char *turn;
    const char *answer; // a turn of the assistant's; NULL: as the others, and how it begins asks for an answer
    bool bos;           // even where the vocabulary does not ask for it
    bool trims;         // space around the text is dropped
} Form;

static const Form forms[N_FORMS] = {
    [PLAIN_TEXT] = {.turn = "{text}"},
    [LLAMA_2] = {.turn = "{[INST]} {text} {[/INST]}", .answer = " {text} {end}", .bos = true, .trims = true},
    [LLAMA_3] = {.turn = "{<|start_header_id|>}{role}{<|end_header_id|>}\n\n{text}{<|eot_id|>}",
                 .bos = true,
                 .trims = true},
    [CHATML] = {.turn = "{<|im_start|>}{role}\n{text}{<|im_end|>}\n"},
    [MISTRAL] = {.turn = "{[INST]} {text} {[/INST]}", .answer = "{text}{end}", .bos = true},
    [ZEPHYR] = {.turn = "<|{role}|>\n{text}{end}\n"},
    [MISTRAL_V3] = {.turn = "{[INST]} {text}{[/INST]}", .answer = " {text}{end}", .bos = true},
};

// What tells a template: two texts that it has, and one that it has not. The first row that fits counts; the last one
// is for what we do not know.
static const struct {
    const char *has, *and, *but;
    TemplateKind kind;
} signs[] = {
    {"<|start_header_id|>", "", NULL, LLAMA_3},   {"<|im_start|>", "", "reasoning_mode", CHATML},
    {"[INST]", "<<SYS>>", NULL, LLAMA_2},         {"[INST]", "", NULL, MISTRAL},
    {"<|user|>", "eos_token", "<|end|>", ZEPHYR}, {"", "", NULL, PLAIN_TEXT},
};

typedef struct {
    TemplateKind kind;
    String system;       // ChatML: what the system says where nobody says otherwise
    bool dated;          // Llama 3.1 and later: the system prompt has two dates
    bool thinks, silent; // Qwen 3: answers may begin with <think>; it is asked not to
} Template;

// ChatML: the default system prompt, a literal in the template between the marks around a system message.
static String template_find_system(const char *source) {
    static const char begin[] = "<|im_start|>system", end[] = "<|im_end|>";
    for (const char *at = source; (at = strstr(at, begin)) != NULL;) {
        at += sizeof begin - 1;
        const char *text = !strncmp(at, "\\n", 2) ? at + 2 : *at == '\n' ? at + 1 : NULL;
        const char *stop = text ? strstr(text, end) : NULL;
        if (stop && strcspn(text, "'\"{}") >= (size_t)(stop - text)) return (String){text, (size_t)(stop - text)};
    }
    return (String){0};
}

// The template of --template, else (kind -1) the one in the file. `source`: the file's jinja2 text, or NULL.
static Template template_choose(int kind, const char *source, const char *path) {
    const char *s = source ? source : "";
    int i = 0;
    while (!strstr(s, signs[i].has) || !strstr(s, signs[i].and) || (signs[i].but && strstr(s, signs[i].but))) i++;
    TemplateKind own = signs[i].kind;
    if (kind < 0 && own == PLAIN_TEXT) {
        if (source) die("%s: unknown chat template: choose one with --template NAME (run -h lists them)", path);
        fprintf(stderr, "run: note: %s has no chat template: it goes on with the text as it is\n", path);
    }
    Template t = {.kind = kind < 0 ? own : (TemplateKind)kind};
    if (t.kind != own) return t; // the rest of what the file says is about another one
    t.dated = t.kind == LLAMA_3 && strstr(s, "Cutting Knowledge Date");
    t.thinks = t.kind == CHATML && strstr(s, "enable_thinking");
    if (t.kind == CHATML) t.system = template_find_system(s);
    return t;
}

// The id of a special piece, or -1.
static int special_id(const Tokenizer *t, String name) {
    for (int i = 0; i < t->n_specials; i++) {
        const Piece *piece = &t->pieces[t->specials[i]];
        if ((size_t)piece->len == name.len && !memcmp(piece->text, name.text, name.len)) return t->specials[i];
    }
    return -1;
}

// </s>, which ends an answer of Llama 2 and its kin; a vocabulary without such a name has a stop token that is not BOS.
static int end_of_answer(const Tokenizer *t) {
    int id = special_id(t, (String){"</s>", 4});
    for (int i = 0; i < t->n_stop_ids && id < 0; i++)
        if (t->stop_ids[i] != t->bos) id = t->stop_ids[i];
    return id;
}

// Ids in the making. Text waits in `pending` until a mark comes, because neighbouring texts are encoded as one.
typedef struct {
    const Template *template;
    const Tokenizer *tokenizer;
    Text pending;
    Ids ids;
} Prompt;

static void prompt_id(Prompt *p, int id) {
    tokenizer_encode(p->tokenizer, p->pending.data, p->pending.len, false, &p->ids);
    p->pending.len = 0;
    if (id >= 0) ids_append(&p->ids, id);
}

// What a message says in its turn.
static void prompt_text(Prompt *p, Message m) {
    const Template *t = p->template;
    char *end;
    if (forms[t->kind].trims) {
        for (; m.len > 0 && isspace((unsigned char)*m.text); m.len--) m.text++;
        while (m.len > 0 && isspace((unsigned char)m.text[m.len - 1])) m.len--;
    }
    if (m.role == SYSTEM && t->dated)
        text_string(&p->pending, "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
    // What an earlier answer thought is not repeated.
    while (m.role == ASSISTANT && t->thinks && (end = memmem(m.text, m.len, "</think>", 8)) != NULL) {
        end += 8;
        while (end < m.text + m.len && *end == '\n') end++;
        m.len -= (size_t)(end - m.text);
        m.text = end;
    }
    text_append(&p->pending, m.text, m.len);
}

// A turn in its form; NULL in place of a message: only its beginning, which asks the assistant for an answer.
static void prompt_turn(Prompt *p, const char *form, const Message *m) {
    for (const char *at = form; *at;) {
        size_t n = strcspn(at, "{");
        text_append(&p->pending, at, n);
        at += n;
        if (!*at) return;
        String name = {at + 1, strcspn(at, "}") - 1};
        at += name.len + 2;
        if (string_is(name, "text") && !m) return;
        if (string_is(name, "role")) text_string(&p->pending, role_names[m ? m->role : ASSISTANT]);
        else if (string_is(name, "text")) prompt_text(p, *m);
        else if (string_is(name, "end")) prompt_id(p, end_of_answer(p->tokenizer));
        else { // a mark: its id, or its letters where the vocabulary has no such piece
            int id = special_id(p->tokenizer, name);
            if (id >= 0) prompt_id(p, id);
            else text_append(&p->pending, name.text, name.len);
        }
    }
}

// Llama 2 and Mistral have no role for the system: it speaks at the beginning of the first message, of the user.
static void prompt_first(Prompt *p, const char *form, const Message *system, const Message *m) {
    bool llama = p->template->kind == LLAMA_2;
    Text said = {0};
    if (llama) text_string(&said, "<<SYS>>\n");
    text_append(&said, system->text, system->len);
    text_string(&said, llama ? "\n<</SYS>>\n\n" : "\n\n");
    text_append(&said, m->text, m->len);
    prompt_turn(p, form, &(Message){USER, said.data, said.len});
    free(said.data);
}

// A conversation as ids, up to where the assistant's next answer begins.
static Ids template_render(const Template *t, const Tokenizer *tokenizer, const Message *messages, int n) {
    Prompt p = {.template = t, .tokenizer = tokenizer};
    bool v3 = t->kind == MISTRAL && special_id(tokenizer, (String){"[INST]", 6}) >= 0;
    const Form *form = &forms[v3 ? MISTRAL_V3 : t->kind];
    const Message fallback = {SYSTEM, (char *)t->system.text, t->system.len};
    const Message *system = n > 0 && messages[0].role == SYSTEM ? messages : NULL;
    if (tokenizer->bos >= 0 && (tokenizer->add_bos || form->bos)) prompt_id(&p, tokenizer->bos);
    if (!system && (t->system.len || t->dated)) prompt_turn(&p, form->turn, &fallback);
    for (const Message *m = messages, *first = m + (system != NULL); m < messages + n; m++) {
        bool opens = m == first && m->role == USER && system && system->len;
        if (m->role == SYSTEM && form->answer) continue;
        if (m != first && m->role == USER && t->kind == LLAMA_2) prompt_id(&p, tokenizer->bos);
        if (opens && form->answer) prompt_first(&p, form->turn, system, m);
        else prompt_turn(&p, m->role == ASSISTANT && form->answer ? form->answer : form->turn, m);
    }
    if (!form->answer) prompt_turn(&p, form->turn, NULL);
    if (t->thinks && t->silent) text_string(&p.pending, "<think>\n\n</think>\n\n");
    prompt_id(&p, -1);
    free(p.pending.data);
    return p.ids;
}

// ---------------------------------------------------------------------------------------------------------------------
// §19 Terminal
//
// Reading a message from a person. The terminal is put into raw mode, where it hands over each key at once and draws
// nothing itself; we keep the line and draw it anew after each key, on one row of the screen: where it is longer, the
// part around the cursor. Text that is pasted comes between two marks (bracketed paste), so that its line breaks are
// text. Ref: ECMA-48 for the sequences.

static struct termios terminal_before; // to be restored, whatever happens
static bool terminal_is_raw;

static void terminal_restore(void) {               // with nothing that a signal handler may not call
    static const char end_paste[] = "\033[?2004l"; // no more bracketed paste
    if (terminal_is_raw && !tcsetattr(STDIN_FILENO, TCSADRAIN, &terminal_before))
        terminal_is_raw = write(STDERR_FILENO, end_paste, sizeof end_paste - 1) < 0;
}

static void on_end_signal(int number) { // ends the process as this signal does, but leaves the terminal as it was
    terminal_restore();
    signal(number, SIG_DFL);
    raise(number);
}

static void terminal_raw(void) {
    static bool registered;
    if (tcgetattr(STDIN_FILENO, &terminal_before)) return;
    if (!registered) {
        atexit(terminal_restore);
        signal(SIGTERM, on_end_signal);
        signal(SIGHUP, on_end_signal);
    }
    registered = true;
    struct termios raw = terminal_before;
    raw.c_iflag &= (tcflag_t) ~(ICRNL | IXON);
    raw.c_lflag &= (tcflag_t) ~(ECHO | ICANON | ISIG | IEXTEN);
    tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    terminal_is_raw = true;
    fputs("\033[?2004h", stderr);
}

// Columns that a character takes on the screen: 0 for marks above others, 2 for East Asian characters and emoji.
static int character_width(uint32_t c) {
    static const uint32_t ranges[][3] = {
        // the first, the last, their width
        {0x300, 0x36f, 0},     {0x1100, 0x115f, 2},  {0x1ab0, 0x1aff, 0}, {0x200b, 0x200f, 0},   {0x20d0, 0x20ff, 0},
        {0x2e80, 0x303e, 2},   {0x3041, 0xa4cf, 2},  {0xac00, 0xd7a3, 2}, {0xf900, 0xfaff, 2},   {0xfe00, 0xfe0f, 0},
        {0xfe30, 0xfe6f, 2},   {0xff00, 0xff60, 2},  {0xffe0, 0xffe6, 2}, {0x1f300, 0x1f64f, 2}, {0x1f680, 0x1f6ff, 2},
        {0x1f900, 0x1f9ff, 2}, {0x20000, 0x3fffd, 2}};
    for (size_t i = 0; i < sizeof ranges / sizeof *ranges; i++)
        if (c >= ranges[i][0] && c <= ranges[i][1]) return (int)ranges[i][2];
    return 1;
}

typedef struct {
    Text text;
    size_t cursor;     // the byte before which the next character goes
    const char *label; // what stands before the line
    Text *history;     // [n_history] earlier messages
    size_t history_cap;
    int n_history, shown; // which of them is shown; n_history: none
} Line;

// The character that begins (direction 1) or ends (-1) at a byte: how many bytes it has. 0: there is none.
static size_t line_step(const Line *l, size_t at, int direction) {
    if (direction > 0) return at < l->text.len ? (size_t)max_int(1, utf8_scan(l->text.data + at, l->text.len - at)) : 0;
    size_t n = at > 0;
    while (n < at && n < 4 && (l->text.data[at - n] & 0xc0) == 0x80) n++;
    return n;
}

// What one character looks like: itself, or a sign for a line break or other control character. Returns its width.
static int line_glyph(const Line *l, size_t at, size_t n, Text *out) {
    unsigned char c = (unsigned char)l->text.data[at];
    if (c == '\n') text_string(out, "\xe2\x86\xb5"); // an arrow
    else if (c < 32 || c == 127) text_string(out, "?");
    else text_append(out, l->text.data + at, n);
    return n > 1 ? character_width(utf8_decode(l->text.data + at, (int)n)) : 1;
}

static void line_draw(const Line *l) {
    struct winsize size = {0};
    int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) || size.ws_col < 20 ? 80 : size.ws_col;
    int label = (int)strlen(l->label), room = columns - label - 1, before = 0, width = 0;
    size_t from = l->cursor, end = 0;
    Text out = {0};
    for (size_t n; (n = line_step(l, from, -1)) > 0; from -= n) { // as much before the cursor as there is room for
        int w = line_glyph(l, from - n, n, &out);
        if (before + w > room) break;
        before += w;
    }
    out.len = 0;
    text_format(&out, "\r%s", l->label);
    for (size_t at = from, n; width <= room && (n = line_step(l, at, 1)) > 0; at += n) {
        end = out.len;
        width += line_glyph(l, at, n, &out);
    }
    if (width > room) out.len = end; // the last one was too much
    text_format(&out, "\033[K\r\033[%dC", label + before);
    fwrite(out.data, 1, out.len, stderr);
    free(out.data);
}

static void line_insert(Line *l, const char *bytes, size_t n) {
    text_append(&l->text, bytes, n); // makes room
    memmove(l->text.data + l->cursor + n, l->text.data + l->cursor, l->text.len - n - l->cursor);
    memcpy(l->text.data + l->cursor, bytes, n);
    l->cursor += n;
}

static void line_delete(Line *l, size_t from, size_t to) {
    memmove(l->text.data + from, l->text.data + to, l->text.len - to);
    l->text.len -= to - from;
    l->cursor = from;
}

// Where the word before the cursor begins (direction -1), or the one after it ends (1). Space between is passed first.
static size_t line_word(const Line *l, int direction) {
    size_t at = l->cursor;
    bool in_word = false;
    for (size_t n; (n = line_step(l, at, direction)) > 0; at += direction > 0 ? n : -n) {
        bool space = isspace((unsigned char)l->text.data[direction > 0 ? at : at - n]);
        if (space && in_word) break;
        in_word |= !space;
    }
    return at;
}

static void line_show_history(Line *l, int which) {
    if (which < 0 || which > l->n_history) return;
    l->shown = which;
    l->text.len = 0;
    if (which < l->n_history) text_append(&l->text, l->history[which].data, l->history[which].len);
    l->cursor = l->text.len;
}

static int read_key(void) {
    unsigned char c;
    return read(STDIN_FILENO, &c, 1) == 1 ? c : -1;
}

// Text that is pasted, up to the closing mark.
static void line_paste(Line *l) {
    static const char closing[] = "\033[201~";
    size_t begin = l->cursor, n = sizeof closing - 1;
    for (int c; (c = read_key()) >= 0;) {
        char byte = c == '\r' ? '\n' : (char)c;
        line_insert(l, &byte, 1);
        if (l->cursor - begin < n || memcmp(l->text.data + l->cursor - n, closing, n)) continue;
        line_delete(l, l->cursor - n, l->cursor);
        return;
    }
}

enum { CTRL = 31, ESCAPE = 27, BACKSPACE = 127, WORD_LEFT = 256, WORD_RIGHT, PASTE }; // CTRL & 'A': what Ctrl-A sends

// Arrows and their like send a sequence that begins with Escape: CSI, parameters, a final byte; Alt with a letter sends
// that letter. Returns the key that does the same, or 0.
static int read_escape(void) {
    static const struct {
        const char *name;
        int key, held; // held: with Ctrl or Alt, where that is another
    } sequences[] = {{"A", CTRL & 'P', 0},  {"B", CTRL & 'N', 0},  {"C", CTRL & 'F', WORD_RIGHT},
                     {"H", CTRL & 'A', 0},  {"F", CTRL & 'E', 0},  {"D", CTRL & 'B', WORD_LEFT},
                     {"1~", CTRL & 'A', 0}, {"4~", CTRL & 'E', 0}, {"b", WORD_LEFT, 0},
                     {"7~", CTRL & 'A', 0}, {"8~", CTRL & 'E', 0}, {"f", WORD_RIGHT, 0},
                     {"3~", CTRL & 'D', 0}, {"200~", PASTE, 0}};
    char name[16] = "";
    size_t n = 0;
    int key = read_key();
    bool alone = key != '[' && key != 'O';
    while (!alone && (key = read_key()) >= 0 && key < '@')
        if (n < sizeof name - 2) name[n++] = (char)key;
    bool held = alone || strchr(name, ';');
    if (key != '~') n = 0; // the parameters of a letter say only which keys were held
    name[n] = (char)key;
    name[n + 1] = 0;
    for (size_t i = 0; i < sizeof sequences / sizeof *sequences; i++)
        if (!strcmp(name, sequences[i].name)) return held && sequences[i].held ? sequences[i].held : sequences[i].key;
    return 0;
}

// One key. Returns true while the line goes on.
static bool line_key(Line *l, int key) {
    char byte = (char)key;
    size_t left = line_step(l, l->cursor, -1), right = line_step(l, l->cursor, 1);
    switch (key == ESCAPE ? read_escape() : key) {
    case '\r':
    case '\n':
        if (!l->text.len || l->text.data[l->text.len - 1] != '\\') return false;
        l->text.data[l->text.len - 1] = '\n'; // a backslash at the end: the message goes on
        l->cursor = l->text.len;
        break;
    case CTRL & 'A': l->cursor = 0; break;
    case CTRL & 'E': l->cursor = l->text.len; break;
    case CTRL & 'B': l->cursor -= left; break;
    case CTRL & 'F': l->cursor += right; break;
    case PASTE: line_paste(l); break;
    case WORD_LEFT: l->cursor = line_word(l, -1); break;
    case WORD_RIGHT: l->cursor = line_word(l, 1); break;
    case CTRL & 'P': line_show_history(l, l->shown - 1); break;
    case CTRL & 'N': line_show_history(l, l->shown + 1); break;
    case CTRL & 'K': l->text.len = l->cursor; break;
    case CTRL & 'U': line_delete(l, 0, l->cursor); break;
    case CTRL & 'W': line_delete(l, line_word(l, -1), l->cursor); break;
    case CTRL & 'D': line_delete(l, l->cursor, l->cursor + right); break;
    case CTRL & 'H':
    case BACKSPACE: line_delete(l, l->cursor - left, l->cursor); break;
    case CTRL & 'L': fputs("\033[H\033[2J", stderr); break;
    default:
        if (key != ESCAPE && (key >= 32 || key == '\t')) line_insert(l, &byte, 1);
    }
    return true;
}

typedef enum { READ_MESSAGE, READ_INTERRUPT, READ_END } ReadResult;

// A message from the terminal, with editing. History grows by it.
static ReadResult line_read(Line *l) {
    ReadResult result = READ_MESSAGE;
    struct pollfd more = {STDIN_FILENO, POLLIN, 0};
    terminal_raw();
    line_show_history(l, l->n_history);
    line_draw(l);
    while (result == READ_MESSAGE) {
        int key = read_key();
        if (key < 0 || (key == (CTRL & 'D') && !l->text.len)) result = READ_END;
        else if (key == (CTRL & 'C')) result = READ_INTERRUPT;
        else if (!line_key(l, key)) break;
        if (poll(&more, 1, 0) <= 0) line_draw(l); // where more was typed, drawing can wait
    }
    l->cursor = l->text.len;
    line_draw(l);
    terminal_restore();
    fputs("\n", stderr);
    if (result != READ_MESSAGE || !l->text.len) return result;
    l->history = reserve(l->history, (size_t)l->n_history + 1, &l->history_cap, sizeof *l->history, "a history");
    l->history[l->n_history] = (Text){0};
    text_append(&l->history[l->n_history++], l->text.data, l->text.len);
    return result;
}

// A message from a pipe or file: a line of any length; a backslash at its end continues it.
static ReadResult line_read_plain(Line *l) {
    l->text.len = 0;
    for (int c; (c = getchar()) != EOF;) {
        char byte = (char)c;
        if (c == '\n' && l->text.len && l->text.data[l->text.len - 1] == '\r') l->text.len--; // of a file from Windows
        bool continued = l->text.len && l->text.data[l->text.len - 1] == '\\';
        if (c == '\n' && !continued) return READ_MESSAGE;
        if (c == '\n') l->text.len--;
        text_append(&l->text, &byte, 1);
    }
    return l->text.len ? READ_MESSAGE : READ_END;
}

static void line_free(Line *l) {
    for (int i = 0; i < l->n_history; i++) free(l->history[i].data);
    free(l->history);
    free(l->text.data);
}

// ---------------------------------------------------------------------------------------------------------------------
// §20 JSON
//
// Results, requests and conversations are JSON Lines: a file with an object on each line. What is read here is no tree:
// a cursor walks a line, and whoever reads says what is to come next. Ref: RFC 8259.

// A text as a JSON string. Bytes that are no UTF-8 become U+FFFD.
static void json_string(Text *out, const char *text, size_t n) {
    text_string(out, "\"");
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)text[i];
        int len = utf8_scan(text + i, n - i);
        if (len <= 0) text_string(out, "\\ufffd");
        else if (c == '"' || c == '\\') text_format(out, "\\%c", c);
        else if (c == '\n') text_string(out, "\\n");
        else if (c < 32) text_format(out, "\\u%04x", c);
        else text_append(out, text + i, (size_t)len);
        i += (size_t)max_int(1, len);
    }
    text_string(out, "\"");
}

// A cursor over a line. The first thing that is wrong sticks, and ends it.
typedef struct {
    const char *begin, *at, *end;
    char wrong[192];
    int where; // the character, from 1
} Json;

__attribute__((format(printf, 2, 3))) static bool json_wrong(Json *j, const char *format, ...) {
    va_list args;
    va_start(args, format);
    if (!j->wrong[0]) {
        vsnprintf(j->wrong, sizeof j->wrong, format, args);
        j->where = (int)(j->at - j->begin) + 1;
    }
    va_end(args);
    j->at = j->end;
    return false;
}

static Json json_open(String line) {
    Json j = {.begin = line.text, .at = line.text, .end = line.text + line.len};
    for (int len; j.at < j.end && (len = utf8_scan(j.at, (size_t)(j.end - j.at))) > 0;) j.at += len;
    if (j.at < j.end) json_wrong(&j, "expected UTF-8");
    else j.at = j.begin;
    return j;
}

// Steps over as many of these characters as stand there, `most` at most. Returns how many.
static int json_skip(Json *j, const char *characters, int most) {
    int n = 0;
    for (; n < most && j->at < j->end && *j->at && strchr(characters, *j->at); j->at++) n++;
    return n;
}

// Steps over space, and over `token` if it stands there.
static bool json_is(Json *j, const char *token) {
    size_t n = strlen(token);
    json_skip(j, " \t\r\n", INT_MAX);
    if ((size_t)(j->end - j->at) < n || memcmp(j->at, token, n)) return false;
    j->at += n;
    return true;
}

static bool json_expect(Json *j, const char *token) { return json_is(j, token) || json_wrong(j, "expected %s", token); }

// The 4 hexadecimal digits of \u.
static bool json_hex(Json *j, uint32_t *c) {
    char digits[5] = "";
    if (json_skip(j, "0123456789abcdefABCDEF", 4) < 4) return json_wrong(j, "expected 4 digits after \\u");
    memcpy(digits, j->at - 4, 4);
    *c = (uint32_t)strtoul(digits, NULL, 16);
    return true;
}

static void append_utf8(Text *out, uint32_t c) {
    int len = c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4;
    static const uint8_t leads[] = {0, 0, 0xC0, 0xE0, 0xF0};
    char bytes[4];
    for (int i = len - 1; i > 0; i--, c >>= 6) bytes[i] = (char)(0x80 | (c & 0x3f));
    bytes[0] = (char)(leads[len] | c);
    text_append(out, bytes, (size_t)len);
}

// What follows a backslash. A half of a surrogate pair without the other becomes U+FFFD.
static bool json_escape(Json *j, Text *out) {
    static const char names[] = "\"\\/bfnrt", values[] = "\"\\/\b\f\n\r\t";
    if (json_skip(j, names, 1)) {
        text_append(out, &values[strchr(names, j->at[-1]) - names], 1);
        return true;
    }
    uint32_t c = 0, low = 0;
    if (j->at == j->end || *j->at++ != 'u') return json_wrong(j, "expected one of \"\\/bfnrtu after a backslash");
    if (!json_hex(j, &c)) return false;
    if (c >= 0xD800 && c < 0xDC00 && j->end - j->at >= 2 && !memcmp(j->at, "\\u", 2)) {
        const char *second = j->at;
        j->at += 2;
        if (!json_hex(j, &low)) return false;
        if (low >= 0xDC00 && low < 0xE000) c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
        else j->at = second; // another character
    }
    append_utf8(out, c >= 0xD800 && c < 0xE000 ? 0xFFFD : c);
    return true;
}

// A string, in place of what `out` holds.
static bool json_read_string(Json *j, Text *out) {
    out->len = 0;
    if (!json_is(j, "\"")) return json_wrong(j, "expected a string");
    while (j->at < j->end && *j->at != '"') {
        if ((unsigned char)*j->at < 0x20) return json_wrong(j, "a control character in a string");
        if (*j->at == '\\') {
            j->at++;
            if (!json_escape(j, out)) return false;
        } else text_append(out, j->at++, 1);
    }
    return json_expect(j, "\"");
}

enum { JSON_NUMBER = 64 };

// A number as it stands there. Ref: RFC 8259, section 6.
static bool json_read_number(Json *j, char number[JSON_NUMBER]) {
    static const char digits[] = "0123456789";
    json_is(j, ""); // skips space
    const char *begin = j->at;
    json_skip(j, "-", 1);
    bool zero = json_skip(j, "0", 1), more = json_skip(j, digits, INT_MAX), good = zero != more; // 0, or no 0 first
    if (json_skip(j, ".", 1)) good &= json_skip(j, digits, INT_MAX) > 0;
    if (json_skip(j, "eE", 1)) {
        json_skip(j, "+-", 1);
        good &= json_skip(j, digits, INT_MAX) > 0;
    }
    size_t n = (size_t)(j->at - begin);
    if (!good || n >= JSON_NUMBER) return json_wrong(j, "expected a number");
    memcpy(number, begin, n);
    number[n] = 0;
    return true;
}

// The name of the next member of the object that the line is; its value comes next. Returns false where there is none:
// the object and the line have ended, or something is wrong.
static bool json_next_member(Json *j, Text *name) {
    bool more = j->at == j->begin ? json_expect(j, "{") && !json_is(j, "}")
                                  : json_is(j, ",") || (!json_is(j, "}") && json_wrong(j, "expected , or }"));
    if (!more) {
        json_is(j, ""); // skips space
        return j->at < j->end && json_wrong(j, "something follows the object");
    }
    if (!json_read_string(j, name) || !json_expect(j, ":")) return false;
    if (name->len && memchr(name->data, 0, name->len))
        return json_wrong(j, "a name with a zero byte is not known here");
    text_append(name, "", 1); // ends it
    return true;
}

// --- the lines of a file

typedef struct {
    Text text;
    size_t at;  // how far it has been read
    int number; // of the line read last, from 1
} Lines;

// The next line that is not blank. Returns false at the end.
static bool lines_next(Lines *l, String *line) {
    if (l->at == 0 && l->text.len >= 3 && !memcmp(l->text.data, "\xEF\xBB\xBF", 3)) l->at = 3; // a byte order mark
    while (l->at < l->text.len) {
        line->text = l->text.data + l->at;
        const char *end = memchr(line->text, '\n', l->text.len - l->at);
        line->len = end ? (size_t)(end - line->text) : l->text.len - l->at;
        l->at += line->len + 1;
        l->number++;
        if (line->len > 0 && line->text[line->len - 1] == '\r') line->len--; // of a file from Windows
        size_t space = 0;
        while (space < line->len && isspace((unsigned char)line->text[space])) space++;
        if (space < line->len) return true;
    }
    return false;
}

// ---------------------------------------------------------------------------------------------------------------------
// §21 Generation
//
// Options and prompt in, text or JSON out. Each mode is a function from the options to an exit code. Generated text
// goes to stdout, everything else to stderr.

// Everything that a stream still holds. A text file, a pipe or standard input; `name` is for messages.
static Text read_stream(FILE *stream, const char *name) {
    Text text = {0};
    char block[1 << 16];
    size_t n;
    while ((n = fread(block, 1, sizeof block, stream)) > 0) text_append(&text, block, n);
    if (ferror(stream)) die("%s: cannot read: %s", name, strerror(errno));
    return text;
}

static Text read_text_file(const char *path) {
    if (!strcmp(path, "-")) return read_stream(stdin, "standard input");
    FILE *stream = fopen(path, "rb");
    if (!stream) die("%s: cannot open: %s", path, strerror(errno));
    Text text = read_stream(stream, path);
    fclose(stream);
    return text;
}

static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

// From here on the first Ctrl-C asks to stop after the current step; a second one ends the process.
static void catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)(SA_RESETHAND | SA_RESTART)};
    sigaction(SIGINT, &action, NULL);
}

static bool stdin_is_redirected(void) {
    struct stat status;
    return !fstat(STDIN_FILENO, &status) && (S_ISREG(status.st_mode) || S_ISFIFO(status.st_mode));
}

// The prompt: -i, else -f, else what is redirected to standard input, else nothing. Editors end a file with a newline
// that nobody means as part of the prompt: one is dropped from a file or stream unless `exact`.
static Text read_prompt(const Options *o, bool exact) {
    Text text = {0};
    if (o->prompt) text_string(&text, o->prompt);
    else if (o->file || stdin_is_redirected()) text = read_text_file(o->file ? o->file : "-");
    if (!o->prompt && !exact && text.len > 0 && text.data[text.len - 1] == '\n') text.len--;
    return text;
}

enum { TINY_MODEL = 4 << 20, SCORED_ROWS = 32 }; // bytes read per token; rows whose logits are held at a time

// `option` is what asks for n positions.
static void note_long_context(const char *option, int n, const Config *c) {
    if (n > c->n_ctx_train)
        fprintf(stderr, "run: note: %s %d is more than the %d positions that the model was trained for\n", option, n,
                c->n_ctx_train);
}

// The type of the key/value cache: --kv, else what suits the weights (§6).
static Type choose_kv_type(const Options *o, const Model *m) {
    static const Type kv_types[] = {F32, F16, I8}; // of kv_words
    if (o->kv >= 0) return kv_types[o->kv];
    return m->layers[0].q.type == F32 ? F32 : F16;
}

static const char *kv_name(Type type) { return type == I8 ? "q8" : type_name(type); }

static int choose_context(const Options *o, const Config *c) {
    note_long_context("--context", o->context, c);
    return o->context ? o->context : min_int(c->n_ctx_train, 4096);
}

// The tokenizer of --tokenizer; without it, the checkpoint's own, or tokenizer.bin where it has none.
static Tokenizer *choose_tokenizer(const Options *o, const Checkpoint *checkpoint) {
    if (!o->tokenizer && checkpoint && has_tokenizer(checkpoint)) return tokenizer_load(checkpoint);
    Checkpoint *file = checkpoint_open(o->tokenizer ? o->tokenizer : "tokenizer.bin");
    Tokenizer *t = tokenizer_load(file);
    checkpoint_close(file);
    return t;
}

// --rope-scaling and --rope-factor, in place of what the file says.
static void choose_rope(const Options *o, Model *m) {
    static const RopeScaling chosen[] = {ROPE_LINEAR, ROPE_NTK, ROPE_YARN}; // of rope_words
    if (o->rope_scaling >= 0) rope_stretch(m, chosen[o->rope_scaling], o->rope_factor);
}

static void engine_load(Engine *e, const Options *o, bool with_tokenizer) {
    double start = seconds();
    if (!o->checkpoint)
        die_usage("expected a checkpoint, as in: run model.gguf -i \"Once upon a time\" (run -h for help)");
    e->n_threads = choose_threads(o);
    Checkpoint *checkpoint = checkpoint_open(o->checkpoint);
    if (with_tokenizer) e->tokenizer = choose_tokenizer(o, checkpoint);
    e->model = model_load(checkpoint, e->n_threads);
    checkpoint_close(checkpoint);
    choose_rope(o, e->model);
    // A token of a tiny model is done before a second thread has woken up.
    if (!o->threads && model_bytes_per_token(e->model) < TINY_MODEL) e->n_threads = 1;
    if (with_tokenizer && e->tokenizer->n_pieces != e->model->config.vocab_size)
        die("%s has %d pieces, but %s has a vocabulary of %d: expected a matching tokenizer (--tokenizer FILE)",
            e->tokenizer->path, e->tokenizer->n_pieces, o->checkpoint, e->model->config.vocab_size);
    e->load_seconds = seconds() - start;
}

// Drafts must be tokens of the same vocabulary. other: that of the draft's file, or NULL where it has none.
static void check_draft_vocabulary(const Engine *e, const Tokenizer *other, const Model *m) {
    const Tokenizer *t = e->tokenizer;
    if (m->config.vocab_size != t->n_pieces)
        die("%s: expected a vocabulary of %d pieces, as %s has, got %d", m->path, t->n_pieces, e->model->path,
            m->config.vocab_size);
    for (int i = 0; other && i < t->n_pieces; i++) {
        const Piece *a = &t->pieces[i], *b = &other->pieces[i];
        bool unwritten = a->type == CONTROL_PIECE && b->type == CONTROL_PIECE; // its spelling does not matter
        if (!unwritten && (a->len != b->len || memcmp(a->text, b->text, (size_t)a->len)))
            die("%s: expected the vocabulary of %s, but piece %d is '%.*s', not '%.*s'", m->path, e->model->path, i,
                b->len, b->text, a->len, a->text);
    }
}

// The model of --draft, with a cache for as long a context.
static Draft *draft_open(const Options *o, const Engine *e) {
    Draft *d = alloc(1, sizeof *d, "draft");
    Checkpoint *checkpoint = checkpoint_open(o->draft);
    Tokenizer *other = has_tokenizer(checkpoint) ? tokenizer_load(checkpoint) : NULL;
    d->model = model_load(checkpoint, e->n_threads);
    checkpoint_close(checkpoint);
    choose_rope(o, d->model);
    check_draft_vocabulary(e, other, d->model);
    if (other) tokenizer_free(other);
    d->sampler = sampler_open(o->sampling, 0, d->model->config.vocab_size);
    d->session = session_open(d->model, choose_kv_type(o, d->model), e->session->n_ctx, 1,
                              min_int(o->chunk, e->session->n_ctx), 1, e->n_threads);
    return d;
}

// Room for n_seqs sequences, whose prompts are run in chunks. longest: of the prompts.
static void engine_open(Engine *e, const Options *o, int n_ctx, int n_seqs, int longest) {
    bool scores_prompts = o->echo && o->logprobs >= 0; // logits for each row, so fewer rows
    e->n_draft = o->draft ? o->n_draft : o->lookup;
    e->slides = o->on_full == ON_FULL_SLIDE;
    int chunk = min_int(scores_prompts ? min_int(o->chunk, SCORED_ROWS) : o->chunk, e->slides ? n_ctx : longest);
    int least = n_seqs * (1 + e->n_draft), rows = max_int(least, chunk + e->n_draft);
    e->session = session_open(e->model, choose_kv_type(o, e->model), n_ctx, n_seqs, rows, scores_prompts ? rows : least,
                              e->n_threads);
    if (o->draft) e->draft = draft_open(o, e);
}

static void engine_free(Engine *e) {
    if (e->draft) {
        session_free(e->draft->session);
        sampler_free(e->draft->sampler);
        model_free(e->draft->model);
        free(e->draft->cached.id);
        free(e->draft);
    }
    if (e->session) session_free(e->session);
    if (e->tokenizer) tokenizer_free(e->tokenizer);
    model_free(e->model);
}

// The ids of a prompt, BOS in front where the vocabulary asks for it or nothing else is there.
static void encode_prompt(const Options *o, const Tokenizer *t, const char *text, size_t len, Ids *ids) {
    bool bos = t->add_bos || (len == 0 && t->bos >= 0);
    if (bos && !o->no_bos) ids_append(ids, t->bos);
    tokenizer_encode(t, text, len, o->special, ids);
}

// What is to become of a sequence whose prompt is in q->ids, as the options say.
static void sequence_begin(const Options *o, const Engine *e, Sequence *q) {
    int n_ctx = e->session->n_ctx, n = q->ids.len, wanted = o->n_tokens < 0 ? 256 : o->n_tokens;
    assert(n > 0 && n <= n_ctx);
    q->max_new = e->slides ? INT_MAX : n_ctx - n + 1; // the token made last needs no position
    // llama2.c counts the prompt's tokens as steps, all but BOS.
    if (wanted) q->max_new = max_int(0, min_int(q->max_new, wanted - (e->model->counts_prompt ? n - 1 : 0)));
    q->n_prompt = n;
    q->n_top = min_int(o->logprobs, e->model->config.vocab_size);
    q->echo = o->echo;
    q->ignores_eos = o->ignore_eos;
    q->decoder.after_bos = n == 1 && q->ids.id[0] == e->tokenizer->bos;
}

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_load(const Engine *e) {
    fprintf(stderr, "load             %.3f s, %d thread%s\n", e->load_seconds, e->n_threads,
            e->n_threads == 1 ? "" : "s");
}

// What the cache takes for each token, and where it is full; what the process took at most; and, last, the seed.
static void print_memory(const Engine *e, uint64_t seed) {
    const Session *s = e->session;
    double per_token = (double)cache_token_bytes(&s->model->config, s->kv_type);
    double all = per_token * min_int(s->n_slots, s->n_ctx) * s->n_seqs;
    fprintf(stderr, "KV cache         %s, %.0f bytes per token, at most %.1f MiB\n", kv_name(s->kv_type), per_token,
            all / (1 << 20));
    fprintf(stderr, "peak memory      %.0f MiB\nseed             %llu\n", peak_memory_mib(), (unsigned long long)seed);
}

static void print_speculation(long long made, long long steps, long long accepted, long long drafted) {
    fprintf(stderr, "speculation      %.2f tokens per step, %lld of %lld drafts accepted\n",
            (double)made / (double)steps, accepted, drafted);
}

static void print_stats(const Engine *e, Timing *t, uint64_t seed) {
    int n = min_int(t->n, LATENCIES);
    print_load(e);
    fprintf(stderr, "prefill          %.1f tokens/s (%d tokens)\n", t->n_prompt / (t->prefilled - t->start),
            t->n_prompt);
    if (t->first > 0)
        fprintf(stderr, "first token      after %.1f ms (time to first token)\n", (t->first - t->start) * 1e3);
    if (n > 0) {
        qsort(t->latency, (size_t)n, sizeof *t->latency, compare_doubles);
        double median = t->latency[n / 2], p99 = t->latency[(n - 1) * 99 / 100];
        fprintf(stderr, "decode           %.1f tokens/s (%d tokens)\n", t->n / (t->last - t->first), t->n);
        fprintf(stderr, "inter-token      median %.2f ms, p99 %.2f ms\n", median * 1e3, p99 * 1e3);
        if (e->n_draft) print_speculation(t->n_made, t->n_steps, t->n_accepted, t->n_drafted);
        else fprintf(stderr, "weights read     %.1f GB/s\n", (double)model_bytes_per_token(e->model) / median / 1e9);
    }
    print_memory(e, seed);
}

// --- JSON

// A log-probability. That of what was cut off, or cannot be known, is null.
static void json_logprob(Text *out, const char *name, float logprob) {
    if (isfinite(logprob)) text_format(out, ", \"%s\": %.9g", name, (double)logprob);
    else text_format(out, ", \"%s\": null", name);
}

static void json_score(Text *out, const Tokenizer *t, Score score, bool first) {
    text_format(out, "%s{\"id\": %d, \"text\": ", first ? "" : ", ", score.id);
    json_string(out, t->pieces[score.id].text, (size_t)t->pieces[score.id].len);
    json_logprob(out, "logprob", score.logprob);
    json_logprob(out, "sampled_logprob", score.sampled);
}

// A list with an entry for each kept token: how likely it was, and the n_top most likely at that position.
static void json_scores(Text *out, const Tokenizer *t, const Sequence *q) {
    text_string(out, ", \"logprobs\": [");
    for (int i = 0; i < q->n_scores; i += 1 + q->n_top) {
        json_score(out, t, q->scores[i], i == 0);
        text_string(out, ", \"top\": [");
        for (int j = 1; j <= q->n_top && q->scores[i + j].id >= 0; j++) {
            json_score(out, t, q->scores[i + j], j == 1);
            text_string(out, "}");
        }
        text_string(out, "]}");
    }
    text_string(out, "]");
}

// What has become of a sequence: the members of an object, and its end. In a batch, where "id" is something else, the
// ids are its "tokens", and what is the same for all is left out.
static void json_sequence(Text *out, const Options *o, const Engine *e, const Sequence *q, bool in_batch,
                          uint64_t seed) {
    static const char *const reasons[] = {"stop", "length", "interrupt"};
    const Timing *t = &q->timing;
    text_string(out, "\"text\": ");
    json_string(out, q->text.data, q->text.len);
    text_format(out, ", \"%s\": [", in_batch ? "tokens" : "ids");
    for (int i = 0; i < q->kept.len; i++) text_format(out, i ? ", %d" : "%d", q->kept.id[i]);
    text_format(out, "], \"finish_reason\": \"%s\"", reasons[q->finish]);
    if (q->n_top >= 0) json_scores(out, e->tokenizer, q);
    if (o->stats) {
        text_format(out, ", \"seed\": %llu, \"prompt_tokens\": %d, \"prefill_seconds\": %.6f", (unsigned long long)seed,
                    t->n_prompt, t->prefilled - t->start);
        if (t->first > 0) text_format(out, ", \"first_token_seconds\": %.6f", t->first - t->start);
        text_format(out, ", \"decoded_tokens\": %d, \"decode_seconds\": %.6f", t->n, t->last - t->first);
        if (!in_batch)
            text_format(out, ", \"threads\": %d, \"load_seconds\": %.4f, \"peak_memory_mib\": %.1f", e->n_threads,
                        e->load_seconds, peak_memory_mib());
        if (e->n_draft)
            text_format(out, ", \"steps\": %d, \"drafted_tokens\": %d, \"accepted_tokens\": %d", t->n_steps,
                        t->n_drafted, t->n_accepted);
    }
    text_string(out, "}\n");
}

// --json: one object on one line.
static void print_json(const Options *o, const Engine *e, const Sequence *q, uint64_t seed) {
    Text line = {0};
    text_string(&line, "{");
    json_sequence(&line, o, e, q, false, seed);
    write_out(line.data, line.len);
    free(line.data);
}

static uint64_t choose_seed(const Options *o) {
    uint64_t clock = (uint64_t)(seconds() * 1e9) ^ (uint64_t)getpid() << 32 ^ (uint64_t)time(NULL);
    return o->seed_given ? o->seed : clock;
}

static int mode_generate(const Options *o) {
    Engine e = {0};
    engine_load(&e, o, true);
    Text prompt = read_prompt(o, false);
    Sequence q = {.streams = !o->json, .keeps = o->json, .stops = o->stops, .n_stops = o->n_stops};
    encode_prompt(o, e.tokenizer, prompt.data, prompt.len, &q.ids);
    if (q.ids.len == 0) die_usage("expected a prompt: without one and without BOS there is no token to start from");
    int n_ctx = choose_context(o, &e.model->config);
    if (q.ids.len > n_ctx) die("the prompt has %d tokens, but the context holds %d (--context N)", q.ids.len, n_ctx);
    engine_open(&e, o, n_ctx, 1, q.ids.len);
    sequence_begin(o, &e, &q);
    uint64_t seed = choose_seed(o);
    q.sampler = sampler_open(o->sampling, seed, e.model->config.vocab_size);
    if (q.streams) write_out(prompt.data, prompt.len);
    else if (q.echo) sequence_keep_prompt(&q, prompt.data, prompt.len);
    catch_interrupt();
    sequence_run(&e, &q);
    if (o->json) print_json(o, &e, &q, seed);
    else write_out("\n", 1);
    if (o->stats && !o->json) print_stats(&e, &q.timing, seed);
    int status = q.finish == FINISH_INTERRUPTED ? 130 : 0;
    sampler_free(q.sampler);
    sequence_free(&q);
    free(prompt.data);
    engine_free(&e);
    return status;
}

// ---------------------------------------------------------------------------------------------------------------------
// §22 Inspection
//
// What a text is to a tokenizer, what a checkpoint holds, and how well a model knows a text.

// --- tokenize: the ids of a text, on one line

static int mode_tokenize(const Options *o) {
    Checkpoint *checkpoint = o->checkpoint && !o->tokenizer ? checkpoint_open(o->checkpoint) : NULL;
    Tokenizer *t = choose_tokenizer(o, checkpoint);
    if (checkpoint) checkpoint_close(checkpoint);
    Text text = read_prompt(o, true), line = {0};
    Ids ids = {0};
    if (t->add_bos && !o->no_bos) ids_append(&ids, t->bos);
    tokenizer_encode(t, text.data, text.len, o->special, &ids);
    for (int i = 0; i < ids.len; i++) text_format(&line, i ? " %d" : "%d", ids.id[i]);
    text_string(&line, "\n");
    write_out(line.data, line.len);
    free(line.data);
    free(ids.id);
    free(text.data);
    tokenizer_free(t);
    return 0;
}

// --- info: what a checkpoint holds

// One line for a matrix, or for that of all layers: its type in the first, its size in all.
static void print_matrix(const Model *m, const Tensor *t) {
    const Matrix *w = tensor_matrix(m, t, 0);
    int copies = tensor_copies(m, t);
    double bytes = 0;
    if (!w || (w == &m->output && m->tied)) return;
    for (int l = 0; l < copies; l++) bytes += (double)matrix_bytes(tensor_matrix(m, t, l));
    printf("  %-10s %4d x [%d, %d] %s", t->field, copies, w->rows, w->cols, type_name(w->type));
    if (w->scales) printf(", groups of %d, %s scales", w->group, scalings[w->scaling].name);
    if (w->has_min) printf(" and minima");
    printf(", %.1f MiB\n", bytes / (1 << 20));
}

static void print_tokenizer(const Tokenizer *t) {
    printf("tokenizer       %s, %d pieces", strcmp(t->model, "gpt2") ? "sentencepiece-style BPE" : "byte-level BPE",
           t->n_pieces);
    if (t->pre[0]) printf(", pre-tokenizer %s", t->pre);
    printf(t->bos < 0 ? "\nBOS             none" : "\nBOS             %d%s", t->bos, t->add_bos ? "" : ", not added");
    printf("\nstop ids       ");
    for (int i = 0; i < t->n_stop_ids; i++) printf(" %d", t->stop_ids[i]);
    printf("\nchat template   %s\n", t->chat_template ? "yes" : "none");
}

static void print_config(const Model *m) {
    static const char *const stretched[] = {"", ", stretched linearly", ", stretched by YaRN", ", stretched NTK-aware"};
    const Config *c = &m->config;
    for (int i = 0; i < N_HYPERPARAMETERS; i++)
        if (*hyperparameter(c, i)) printf("%-15s %d\n", hyperparameters[i].name, *hyperparameter(c, i));
    printf("norm epsilon    %g\nRoPE base       %g%s", (double)c->norm_eps, c->rope_base, stretched[c->rope_scaling]);
    if (c->rope_scaling) printf(" by %g from %d", c->rope_factor, c->rope_n_ctx);
    printf("\noutput          %s\n", m->tied ? "tied to the embedding" : "separate");
}

static void print_sizes(const Model *m, Type kv_type, int n_ctx, int chunk) {
    const Config *c = &m->config;
    double per_token = (double)cache_token_bytes(c, kv_type);
    int slots = min_int(n_ctx, cache_slots(c, n_ctx, chunk));
    double read = (double)model_bytes_per_token(m), weights = read + (m->tied ? 0 : (double)matrix_bytes(&m->embed));
    printf("weights         %.1f MiB in memory, %.1f MiB read for each token\n", weights / (1 << 20), read / (1 << 20));
    printf("KV cache        %.0f bytes per token (%s), %.1f MiB for a context of %d", per_token, kv_name(kv_type),
           per_token * slots / (1 << 20), n_ctx);
    if (slots < n_ctx) printf(" (a ring of %d)", slots);
    printf("\n");
    printf("matrices        types are those of the first layer, sizes of all\n");
    for (const Tensor *t = tensors; t < tensors + N_TENSORS; t++) print_matrix(m, t);
}

// A line with a text from the file. None where it is empty.
static void print_text(const char *name, String value) {
    char text[96];
    if (!value.len) return;
    snprintf(text, sizeof text, "%.*s", shown(value), value.text);
    printf("%-15s ", name);
    print_escaped(stdout, text);
    printf("\n");
}

static int mode_info(const Options *o) {
    if (!o->checkpoint) die_usage("info: expected a checkpoint, as in: run model.gguf -m info");
    Checkpoint *checkpoint = checkpoint_open(o->checkpoint);
    const Gguf *g = checkpoint->gguf;
    Tokenizer *t = has_tokenizer(checkpoint) ? tokenizer_load(checkpoint) : NULL;
    printf("file            %s, %.1f MiB\n", o->checkpoint, (double)checkpoint->file.size / (1 << 20));
    Model *m = g && !g->n_tensors ? NULL : model_load(checkpoint, choose_threads(o));
    if (m) {
        choose_rope(o, m);
        printf("format          %s\n", m->format);
        print_text("name", (String){m->name, strlen(m->name)});
        print_config(m);
    } else {
        printf("format          GGUF version %d, a vocabulary alone\n", g->version);
        print_text("architecture", g->arch);
    }
    if (t) print_tokenizer(t);
    if (m) print_sizes(m, choose_kv_type(o, m), choose_context(o, &m->config), o->chunk);
    if (m) model_free(m);
    if (t) tokenizer_free(t);
    checkpoint_close(checkpoint);
    return 0;
}

// --- perplexity: how surprised a model is by a text
//
// perplexity = exp(mean of -log p(token | what is before it)). A text longer than the window is cut into windows
// that overlap: each begins with BOS and holds window - 1 tokens of text, the next starts `stride` tokens later, and
// in each only those tokens count that no earlier window has scored. So every token counts once, with some context
// before it. A model without BOS reads the token before the window instead, and does not score the first one of the
// text.

typedef struct {
    double sum, sum_of_squares; // of -log p
    size_t n, bytes;            // tokens scored, and the bytes they stand for
} Surprise;

// Score the tokens of one window, `lead` and after it ids[0..n), from index `first` on.
static void score_window(Engine *e, int lead, const int *ids, int n, int first, Surprise *total) {
    Row rows[SCORED_ROWS];
    for (int done = 0; done < n && !interrupted;) { // row i holds the token before ids[i] and predicts ids[i]
        int count = min_int(n - done, SCORED_ROWS);
        for (int i = 0; i < count; i++) {
            int at = done + i;
            rows[i] = (Row){at ? ids[at - 1] : lead, at, 0, at >= first};
        }
        forward(e->session, rows, count);
        for (int i = 0; i < e->session->n_wanted; i++) {
            int id = ids[done + e->session->wanted[i]];
            float *logits = e->session->logits + (size_t)i * e->session->vocab_stride;
            double chosen = (double)logits[id], nll = log_sum_exp(logits, e->model->config.vocab_size) - chosen;
            if (!isfinite(nll)) die("the logits are not finite numbers: the weights are broken");
            const Piece *piece = &e->tokenizer->pieces[id];
            bool text = piece->type == NORMAL_PIECE || piece->type == USER_PIECE;
            total->sum += nll;
            total->sum_of_squares += nll * nll;
            total->n++;
            total->bytes += text ? (size_t)piece->len : 1;
        }
        done += count;
    }
}

static void print_perplexity(const Surprise *total, int window, int stride) {
    double n = (double)total->n, mean = total->sum / n, variance = fmax(total->sum_of_squares / n - mean * mean, 0);
    double perplexity = exp(mean), error = perplexity * sqrt(variance / n); // delta method
    printf("perplexity %.4f ± %.4f, %.4f nats per token", perplexity, error, mean);
    if (total->bytes) printf(", %.4f bits per byte", total->sum / M_LN2 / (double)total->bytes);
    printf(" (%zu tokens, window %d, stride %d)%s\n", total->n, window, stride, interrupted ? ", interrupted" : "");
}

static int mode_perplexity(const Options *o) {
    Engine e = {0};
    engine_load(&e, o, true);
    int window = o->window ? o->window : min_int(512, e.model->config.n_ctx_train);
    int stride = o->stride ? o->stride : max_int(1, window / 2);
    if (window < 2) die_usage("--window: expected at least 2 (a BOS and a token), got %d", window);
    if (stride > window - 1)
        die_usage("--stride: expected at most window - 1 = %d, got %d: tokens would be left out", window - 1, stride);
    note_long_context("--window", window, &e.model->config);
    Text text = read_prompt(o, true);
    Ids ids = {0};
    tokenizer_encode(e.tokenizer, text.data, text.len, o->special, &ids);
    bool bos = e.tokenizer->add_bos && !o->no_bos;
    int begin = bos ? 0 : 1, scored = begin, n = ids.len;
    if (n <= begin) die("perplexity: expected a text of at least %d tokens, got %d", begin + 1, n);
    if (o->n_tokens > 0) n = min_int(n, begin + o->n_tokens);
    e.session = session_open(e.model, choose_kv_type(o, e.model), window, 1, SCORED_ROWS, SCORED_ROWS, e.n_threads);
    catch_interrupt();
    Surprise total = {0};
    for (; scored < n && !interrupted; begin += stride) {
        int count = min_int(window - 1, n - begin), lead = bos ? e.tokenizer->bos : ids.id[begin - 1];
        score_window(&e, lead, ids.id + begin, count, scored - begin, &total);
        scored = begin + count;
    }
    if (bos && e.tokenizer->space_prefix && total.bytes) total.bytes--; // the space in front is not of the text
    if (total.n) print_perplexity(&total, window, stride);
    free(text.data);
    free(ids.id);
    engine_free(&e);
    return interrupted ? 130 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §23 Chat
//
// A conversation: messages in, answers out. For every answer the conversation is rendered to ids (§18); of these the
// cache already holds a common prefix, and only what follows is run through the model. So a turn costs its own tokens,
// whatever was changed (a new system prompt, a turn taken back) costs what comes after it, and there is no other state
// to keep in step.
//
// A SESSION is a conversation in a file, JSON Lines in the order in which things happened:
//
//     {"role": "user", "content": "Hello"}     a message: of the user, the assistant, or a new system prompt
//     {"undo": 2}                              the last 2 messages (the system prompt is none) are taken back
//
// A line is appended as soon as it is certain, and is on the disk before anything else happens: whatever ends the
// process, no more than the answer that was being written is lost. Nothing in the file depends on the model.

typedef struct {
    Engine *engine;
    const Options *options;
    Template template;
    Sampler *sampler;
    Text system;       // the system prompt; empty: none
    Message *messages; // [n_messages] of the user and the assistant
    size_t messages_cap;
    int n_messages, first; // the model is shown those from `first` on: what is older had to make room
    Sequence last;         // the last answer, of which the cache has ids[0..n_cached)
    uint64_t seed;
    int file;     // of the session; -1: none, or no more
    Text unsaved; // lines that are not in it yet
    bool failed;  // something could not be written
    bool colours; // on standard error
} Chat;

// A remark for the person, dim on a terminal.
__attribute__((format(printf, 2, 3))) static void chat_say(const Chat *c, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    if (c->colours) fputs("\033[2m", stderr);
    vfprintf(stderr, format, arguments);
    if (c->colours) fputs("\033[0m", stderr);
    fputs("\n", stderr);
    va_end(arguments);
}

// --- what changes a conversation, and its lines in the file

static void append_message(Text *out, Role role, const char *text, size_t len) {
    text_format(out, "{\"role\": \"%s\", \"content\": ", role_names[role]);
    json_string(out, text, len);
    text_string(out, "}\n");
}

// Append to a file, so that it is on the disk.
static bool append_synced(int file, const Text *text) {
    for (size_t done = 0; done < text->len;) {
        ssize_t n = write(file, text->data + done, text->len - done);
        if (n < 0) return false;
        done += (size_t)n;
    }
    return !fsync(file);
}

// What happened goes into the file. After a failure nothing more does: what may be part of a line must be the last.
static void chat_sync(Chat *c) {
    if (c->file >= 0 && c->unsaved.len && !append_synced(c->file, &c->unsaved)) {
        chat_say(c, "run: %s: cannot write: %s: from here on nothing is saved", c->options->session, strerror(errno));
        c->failed = true;
        c->file = -1;
    }
    c->unsaved.len = 0;
}

static void chat_append(Chat *c, Role role, const char *text, size_t len) {
    char *copy = memcpy(alloc(len + 1, 1, "a message"), len ? text : "", len);
    c->messages = reserve(c->messages, (size_t)c->n_messages + 1, &c->messages_cap, sizeof *c->messages, "messages");
    c->messages[c->n_messages++] = (Message){role, copy, len};
    append_message(&c->unsaved, role, text, len);
    chat_sync(c);
}

static void chat_set_system(Chat *c, const char *text, size_t len) {
    if (len == c->system.len && (!len || !memcmp(text, c->system.data, len))) return;
    c->system.len = 0;
    text_append(&c->system, text, len);
    append_message(&c->unsaved, SYSTEM, text, len);
}

// Take the last n messages back.
static void chat_undo(Chat *c, int n) {
    if (n == 0) return;
    for (int i = 0; i < n; i++) free(c->messages[--c->n_messages].text);
    if (c->first >= c->n_messages) c->first = 0; // then there may be room again
    text_format(&c->unsaved, "{\"undo\": %d}\n", n);
}

// --- sessions

// What a line of the file says, done again. Returns false where it is not one of a conversation.
static bool chat_read_line(Chat *c, Json *j) {
    Text name = {0}, role = {0}, content = {0};
    char number[JSON_NUMBER], *end = number;
    bool has_content = false;
    long undo = 0;
    while (json_next_member(j, &name)) {
        if (!strcmp(name.data, "role")) json_read_string(j, &role);
        else if (!strcmp(name.data, "content")) has_content = json_read_string(j, &content);
        else if (strcmp(name.data, "undo")) json_wrong(j, "\"%.80s\" is not known here", name.data);
        else if (json_read_number(j, number)) {
            undo = strtol(number, &end, 10);
            if (*end || undo < 1 || undo > c->n_messages)
                json_wrong(j, "\"undo\": expected a whole number from 1 to %d, got %s", c->n_messages, number);
        }
    }
    j->at = j->begin; // what is wrong from here on is wrong with the whole line
    int who = SYSTEM;
    while (who <= ASSISTANT && !string_is((String){role.data, role.len}, role_names[who])) who++;
    if (undo ? role.len || has_content : who > ASSISTANT || !has_content)
        json_wrong(j, "expected a \"role\" (system, user or assistant) and its \"content\", or an \"undo\"");
    if (!j->wrong[0]) {
        if (undo) chat_undo(c, (int)undo);
        else if (who == SYSTEM) chat_set_system(c, content.data, content.len);
        else chat_append(c, (Role)who, content.data, content.len);
    }
    free(name.data);
    free(role.data);
    free(content.data);
    return !j->wrong[0];
}

// Go on with the conversation in a file. It is only ever appended to, so its mode, its owner and links to it stay. A
// process that was killed may have left its last line in pieces; otherwise a file that is not wholly understood is
// refused, and left as it is.
static void chat_open_session(Chat *c, const char *path) {
    static const char begin[] = "{\"role\": \""; // of a line that we write
    int file = open(path, O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    struct stat status;
    if (file < 0 || fstat(file, &status)) die("%s: cannot write: %s", path, strerror(errno));
    if (!S_ISREG(status.st_mode)) die("%s: cannot write: is not a saved conversation", path);
    if (!(status.st_mode & 0222)) die("%s: cannot write: the file is read-only", path); // to root, too
    if (flock(file, LOCK_EX | LOCK_NB) && errno == EWOULDBLOCK) die("%s: another run has this conversation open", path);
    size_t len = (size_t)lseek(file, 0, SEEK_END);
    Lines lines = {.text = {alloc(len, 1, path), len, len}};
    if (pread(file, lines.text.data, len, 0) != (ssize_t)len) die("%s: cannot read: %s", path, strerror(errno));
    bool known = false;                                     // a line was understood: the file is ours
    bool unended = len && lines.text.data[len - 1] != '\n'; // its last line has no line break
    for (String line; lines_next(&lines, &line); known = true) {
        Json j = json_open(line);
        if (chat_read_line(c, &j)) continue;
        bool ours = known || !memcmp(line.text, begin, line.len < sizeof begin ? line.len : sizeof begin - 1);
        size_t good = (size_t)j.where - 1, left = line.len - good; // what is cut off ends where more was expected
        if (!ours || !unended || lines.at < len || (left && utf8_scan(line.text + good, left)))
            die("%s: %sline %d: %s (character %d)", path, known ? "" : "is not a saved conversation: ", lines.number,
                j.wrong, j.where);
        if (ftruncate(file, line.text - lines.text.data)) die("%s: cannot write: %s", path, strerror(errno));
        chat_say(c, "run: note: %s: line %d was not written to its end: it is cut off", path, lines.number);
        unended = false;
    }
    c->file = file;
    c->unsaved.len = 0; // all this is in the file
    if (unended) text_string(&c->unsaved, "\n");
    if (c->n_messages) chat_say(c, "[%d messages from %s]", c->n_messages, path);
    if (c->n_messages && c->messages[c->n_messages - 1].role == USER)
        chat_say(c, "[the last message has no answer yet: /regen answers it]");
    free(lines.text.data);
}

// Write the whole conversation into a new file.
static void chat_save(Chat *c, const char *path) {
    Text all = {0};
    if (c->system.len) append_message(&all, SYSTEM, c->system.data, c->system.len);
    for (const Message *m = c->messages; m < c->messages + c->n_messages; m++)
        append_message(&all, m->role, m->text, m->len);
    int file = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    bool saved = file >= 0 && append_synced(file, &all);
    c->failed |= !saved && errno != EEXIST;
    if (saved) chat_say(c, "[saved %d messages: %s]", c->n_messages, path);
    else chat_say(c, "run: %s: cannot write: %s", path, strerror(errno));
    if (file >= 0 && !saved) remove(path);
    if (file >= 0) close(file);
    free(all.data);
}

// --- answers

// The conversation from a message on, as ids.
static Ids chat_render(const Chat *c, int first) {
    Message *shown = alloc((size_t)(c->n_messages - first) + 1, sizeof *shown, "messages");
    int n = 0;
    if (c->system.len) shown[n++] = (Message){SYSTEM, c->system.data, c->system.len};
    for (int i = first; i < c->n_messages; i++) shown[n++] = c->messages[i];
    Ids ids = template_render(&c->template, c->engine->tokenizer, shown, n);
    free(shown);
    return ids;
}

static int chat_length(const Chat *c, int first) {
    Ids ids = chat_render(c, first);
    free(ids.id);
    return ids.len;
}

// Room for an answer: the oldest turns are left out, whole, until a quarter of the context is free. The system prompt
// and the last message stay. (From the newest back, so that no more is rendered than fits.)
static void chat_make_room(Chat *c) {
    int n_ctx = c->engine->session->n_ctx, most = n_ctx - n_ctx / 4, first = c->n_messages - 1;
    if (chat_length(c, c->first) <= most) return;
    for (int i = first - 1; i > c->first && chat_length(c, i) <= most; i--)
        if (c->messages[i].role == USER) first = i;
    if (first > c->first)
        chat_say(c, "[the context of %d tokens is full: the oldest messages are dropped, %d]", n_ctx, first - c->first);
    c->first = first;
}

// Answer the last message. Ctrl-C ends the answer; what was said stays.
static void chat_answer(Chat *c) {
    Engine *e = c->engine;
    const Options *o = c->options;
    int n_ctx = e->session->n_ctx, least = chat_length(c, c->n_messages - 1);
    if (least == 0 || least >= n_ctx) {
        chat_say(c, "[a message of %d tokens does not fit into a context of %d (--context N): it is dropped]", least,
                 n_ctx);
        chat_undo(c, 1);
        return;
    }
    chat_make_room(c);
    Sequence q = {.streams = !o->json, .keeps = true, .stops = o->stops, .n_stops = o->n_stops, .sampler = c->sampler};
    q.ids = chat_render(c, c->first);
    q.n_cached = common_prefix(e->session, 0, &c->last.ids, c->last.n_cached, &q.ids);
    int room = e->slides ? INT_MAX : n_ctx - q.ids.len, wanted = max_int(0, o->n_tokens);
    sequence_begin(o, e, &q);
    q.max_new = wanted ? min_int(wanted, room) : room; // for each answer anew
    interrupted = 0;
    catch_interrupt();
    sequence_run(e, &q);
    signal(SIGINT, SIG_DFL);
    if (o->json) print_json(o, e, &q, c->seed);
    else write_out("\n", 1);
    chat_append(c, ASSISTANT, q.text.data, q.text.len);
    if (q.finish == FINISH_INTERRUPTED) chat_say(c, "[stopped]");
    if (q.finish == FINISH_LENGTH && q.max_new == room) chat_say(c, "[the context of %d tokens is full]", n_ctx);
    sequence_free(&c->last);
    c->last = q;
    if (o->stats && !o->json) print_stats(e, &c->last.timing, c->seed);
}

// --- commands

static const char chat_help[] = "/reset           begin anew; the system prompt stays\n"
                                "/system TEXT     another system prompt (none: without one)\n"
                                "/undo            take back the last message and its answer\n"
                                "/regen           another answer to the last message\n"
                                "/stats           speed and memory of the last answer\n"
                                "/save FILE       write the conversation; --session FILE goes on with it\n"
                                "/exit            end (also Ctrl-D); Ctrl-C stops an answer\n"
                                "A backslash at the end of a line continues it. A pasted text is one message.";

// A line that begins with a slash. Returns false at /exit.
static bool chat_command(Chat *c, char *line) {
    char *argument = line + strcspn(line, " ");
    int user = c->n_messages - 1; // the last message of the user; -1: there is none
    while (user >= 0 && c->messages[user].role != USER) user--;
    if (*argument) *argument++ = 0;
    if (!strcmp(line, "/exit") || !strcmp(line, "/quit")) return false;
    if (!strcmp(line, "/help")) chat_say(c, "%s", chat_help);
    else if (!strcmp(line, "/reset")) chat_undo(c, c->n_messages);
    else if (!strcmp(line, "/system")) chat_set_system(c, argument, strlen(argument));
    else if (!strcmp(line, "/stats") && !c->last.timing.n_prompt) chat_say(c, "[no answer yet]");
    else if (!strcmp(line, "/stats")) print_stats(c->engine, &c->last.timing, c->seed);
    else if (!strcmp(line, "/save") && !*argument) chat_say(c, "[/save FILE]");
    else if (!strcmp(line, "/save")) chat_save(c, argument);
    else if (!strcmp(line, "/undo") && user < 0) chat_say(c, "[nothing to take back]");
    else if (!strcmp(line, "/undo")) {
        chat_undo(c, c->n_messages - user);
        chat_say(c, "[taken back]");
    } else if (!strcmp(line, "/regen") && user < 0) chat_say(c, "[nothing to answer]");
    else if (!strcmp(line, "/regen")) {
        chat_undo(c, c->n_messages - user - 1); // is saved with the new answer: until then the old one is there
        chat_answer(c);
    } else chat_say(c, "[unknown command %s: /help lists them]", line);
    return true;
}

// Messages and answers until the input ends.
static void chat_loop(Chat *c) {
    bool typed = isatty(STDIN_FILENO), warned = false;
    Line line = {.label = "> "};
    if (c->options->prompt) {
        chat_append(c, USER, c->options->prompt, strlen(c->options->prompt));
        chat_answer(c);
    }
    for (;;) {
        chat_sync(c);
        ReadResult result = typed ? line_read(&line) : line_read_plain(&line);
        if (result == READ_END || (result == READ_INTERRUPT && warned)) break;
        warned = result == READ_INTERRUPT;
        if (warned) chat_say(c, "[Ctrl-C again, or /exit, ends]");
        if (warned || !line.text.len) continue;
        text_append(&line.text, "", 1); // ends it
        if (*line.text.data != '/') {
            chat_append(c, USER, line.text.data, line.text.len - 1);
            chat_answer(c);
        } else if (!chat_command(c, line.text.data)) break;
    }
    line_free(&line);
}

static int mode_chat(const Options *o) {
    Engine e = {0};
    engine_load(&e, o, true);
    int n_ctx = choose_context(o, &e.model->config);
    engine_open(&e, o, n_ctx, 1, n_ctx);
    Chat c = {.engine = &e, .options = o, .seed = choose_seed(o), .file = -1};
    c.template = template_choose(o->template, e.tokenizer->chat_template, e.tokenizer->path);
    c.template.silent = o->no_think;
    c.sampler = sampler_open(o->sampling, c.seed, e.model->config.vocab_size);
    c.colours = isatty(STDERR_FILENO) && !getenv("NO_COLOR");
    if (o->session) chat_open_session(&c, o->session);
    if (o->system) chat_set_system(&c, o->system, strlen(o->system));
    if (isatty(STDIN_FILENO))
        chat_say(&c, "%s, template %s. /help lists commands.", e.model->name[0] ? e.model->name : o->checkpoint,
                 template_words[c.template.kind]);
    if (o->file && strcmp(o->file, "-") && !freopen(o->file, "rb", stdin))
        die("%s: cannot open: %s", o->file, strerror(errno));
    chat_loop(&c);
    for (int i = 0; i < c.n_messages; i++) free(c.messages[i].text);
    free(c.messages);
    free(c.system.data);
    free(c.unsaved.data);
    sequence_free(&c.last);
    sampler_free(c.sampler);
    engine_free(&e);
    return c.failed ? 1 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §24 Requests
//
// What a batch is asked for: a prompt a line, or JSON Lines, an object a line, whose members may be missing, all but
// the prompt:
//
//     {"prompt": "Once", "id": "a1", "max_tokens": 50, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
//      "repeat_penalty": 1.1, "seed": 7, "stop": ["\n\n", "END"]}
//
// What is missing or null is as the options say. Anything else in a line makes it a bad one.

typedef struct {
    int line;           // of the file, from 1
    Text prompt;        // as given
    Text id;            // as JSON
    Options options;    // as for all, but for what the line says
    const char **stops; // [n_stops] stop strings of its own
    size_t stops_cap;
    int n_stops;
    bool has_prompt;
} Request;

static void request_free(Request *r) {
    for (int i = 0; i < r->n_stops; i++) free((char *)r->stops[i]);
    free(r->stops);
    free(r->prompt.data);
    free(r->id.data);
}

static void request_add_stop(Json *j, Request *r) {
    Text stop = {0};
    json_read_string(j, &stop);
    if (!stop.len || memchr(stop.data, 0, stop.len)) json_wrong(j, "expected a text that is not empty");
    text_append(&stop, "", 1); // ends it
    r->stops = reserve(r->stops, (size_t)r->n_stops + 1, &r->stops_cap, sizeof *r->stops, "stop strings");
    r->stops[r->n_stops++] = stop.data;
}

// "stop": a string or a list of strings, in place of those of --stop (and of an earlier "stop").
static bool request_read_stops(Json *j, Request *r) {
    int begin = r->n_stops;
    if (!json_is(j, "[")) request_add_stop(j, r);
    else if (!json_is(j, "]")) {
        do request_add_stop(j, r);
        while (json_is(j, ","));
        json_expect(j, "]");
    }
    if (r->stops) r->options.stops = r->stops + begin;
    r->options.n_stops = r->n_stops - begin;
    return !j->wrong[0];
}

// "id": a string or a number, kept as it is written.
static bool request_read_id(Json *j, Request *r) {
    Text unused = {0};
    char number[JSON_NUMBER];
    json_is(j, ""); // skips space
    const char *begin = j->at, first = begin < j->end ? *begin : 0;
    if (first != '"' && first != '-' && !isdigit((unsigned char)first))
        return json_wrong(j, "expected a string or a number");
    bool good = first == '"' ? json_read_string(j, &unused) : json_read_number(j, number);
    free(unused.data);
    r->id.len = 0;
    text_append(&r->id, begin, (size_t)(j->at - begin));
    return good;
}

// A member that is one of the options.
static bool request_read_option(Json *j, Request *r, const Option *option) {
    char number[JSON_NUMBER];
    Text wrong = {0};
    if (json_read_number(j, number) && !option_set(&r->options, option, number, &wrong))
        json_wrong(j, "%.*s", (int)wrong.len, wrong.data);
    free(wrong.data);
    return !j->wrong[0];
}

static bool request_unknown_member(Json *j) {
    Text known = {0};
    for (const Option *o = options; o < options + N_OPTIONS; o++)
        if (o->member) text_format(&known, ", %s", o->member);
    json_wrong(j, "is not known here; known are prompt, id%.*s and stop", (int)known.len, known.data);
    free(known.data);
    return false;
}

// The value of one member of the object.
static bool request_read_member(Json *j, Request *r, const char *name) {
    const Option *option = option_of_member(name);
    if (json_is(j, "null")) return true; // as if it were not there
    if (option) return request_read_option(j, r, option);
    if (!strcmp(name, "id")) return request_read_id(j, r);
    if (!strcmp(name, "stop")) return request_read_stops(j, r);
    if (strcmp(name, "prompt")) return request_unknown_member(j);
    r->has_prompt = true;
    return json_read_string(j, &r->prompt);
}

// An object that is a request. Returns false and says in `wrong` why it is none.
static bool request_parse(Request *r, String line, Text *wrong) {
    Json j = json_open(line);
    Text name = {0};
    while (json_next_member(&j, &name))
        if (!request_read_member(&j, r, name.data)) text_format(wrong, "\"%.80s\": ", name.data);
    if (!j.wrong[0] && !r->has_prompt) json_wrong(&j, "expected a \"prompt\"");
    if (j.wrong[0]) text_format(wrong, "%s (character %d)", j.wrong, j.where);
    free(name.data);
    return !j.wrong[0];
}

// ---------------------------------------------------------------------------------------------------------------------
// §25 Batch
//
// Many prompts from a file, a number of them together. Every place in the cache has a sequence (§11); one that is done
// makes room for the next prompt at once, while the others go on. A prompt that begins like one whose keys and values
// are in the cache takes over what they have in common, and waits for it where it is just being computed. Results are
// JSON Lines. A line that makes no sense is reported with its number, and the rest goes on.

typedef struct {
    Sequence q;
    Request request;
    bool busy, waits; // it has a request, which waits for a prefix
    int order;        // among the requests
} Place;

typedef struct {
    Text line;  // what is to be written; nothing while it is not done
    int n_rows; // that it takes alone
} Result;

typedef struct {
    Engine *engine;
    const Options *options;
    uint64_t seed;
    const char *name;   // of the input
    const char *output; // NULL: standard output
    Lines input;
    bool json, guessed; // it is JSON Lines; by its first line, not by its name
    bool *known;        // [lines + 1]   an earlier run has the result of this line
    FILE *out;
    Place *places; // [n_places]
    int n_places;
    Result *results; // [n_results]  in the order of the input
    size_t results_cap;
    int n_results, n_written;
    int n_total, n_done, n_wrong;
    long long n_tokens, n_shared;             // made; of prompts, taken over from others
    long long n_steps, n_drafted, n_accepted; // of all sequences
    double start, shown;
} Batch;

static void batch_complain(Batch *b, const char *wrong) {
    fputs(isatty(STDERR_FILENO) ? "\r\033[Krun: " : "run: ", stderr);
    print_escaped(stderr, b->name);
    fprintf(stderr, ": line %d: ", b->input.number);
    print_escaped(stderr, wrong);
    if (b->guessed && !b->n_wrong) fputs(" (the first line begins with {, so all are read as JSON)", stderr);
    fputc('\n', stderr);
    b->n_wrong++;
}

// How a line of the output begins: so --resume knows it again.
static void batch_head(Text *out, const Request *r) {
    text_format(out, "{\"line\": %d, \"id\": ", r->line);
    text_append(out, r->id.data, r->id.len);
    text_string(out, ", ");
}

// What a line of the input asks for. Where that makes no sense, `wrong` says why.
static void batch_parse(const Batch *b, int number, String line, Request *r, Text *wrong) {
    *r = (Request){.line = number, .options = *b->options};
    r->options.seed = b->seed;
    text_format(&r->id, "%d", number);
    if (b->json) request_parse(r, line, wrong);
    else text_append(&r->prompt, line.text, line.len);
}

// The next request that makes sense and is not done yet, with its ids. Returns false at the end.
static bool batch_next_request(Batch *b, Request *r, Ids *ids) {
    int n_ctx = b->engine->session->n_ctx;
    for (String line; lines_next(&b->input, &line);) {
        if (b->known[b->input.number]) continue;
        Text wrong = {0};
        *ids = (Ids){0};
        batch_parse(b, b->input.number, line, r, &wrong);
        if (!wrong.len) encode_prompt(b->options, b->engine->tokenizer, r->prompt.data, r->prompt.len, ids);
        if (ids->len > n_ctx)
            text_format(&wrong, "the prompt has %d tokens, but the context holds %d (--context N)", ids->len, n_ctx);
        if (!wrong.len && ids->len) return true;
        if (!wrong.len) text_string(&wrong, "without a prompt and without BOS there is no token to start from");
        text_append(&wrong, "", 1); // ends it
        batch_complain(b, wrong.data);
        free(wrong.data);
        request_free(r);
        free(ids->id);
    }
    return false;
}

// Take over what the cache holds of this prompt. Returns false where more of it is just being computed: then it waits.
static bool batch_share(Batch *b, Place *p) {
    const Session *s = b->engine->session;
    int cached = p->q.n_cached, from = -1, coming = 0;
    for (int i = 0; i < b->n_places; i++) {
        const Place *other = &b->places[i];
        if (other == p) continue;
        int common = common_prefix(s, i, &other->q.ids, other->q.n_cached, &p->q.ids);
        if (common > cached) from = i;
        cached = max_int(cached, common);
        if (other->busy && !other->waits)
            coming = max_int(coming, common_prefix(s, i, &other->q.ids, other->q.ids.len, &p->q.ids));
    }
    if (coming >= cached + PANEL) return false;
    if (from >= 0) cache_copy(s, from, p->q.place, cached);
    p->q.n_cached = p->q.timing.n_prompt = cached;
    b->n_shared += cached;
    return true;
}

// Give a place to the next request. Returns false where there is none.
static bool batch_admit(Batch *b, Place *p) {
    Ids ids;
    if (!batch_next_request(b, &p->request, &ids)) return false;
    const Request *r = &p->request;
    const Options *o = &r->options;
    Sequence q = {.keeps = true, .stops = o->stops, .n_stops = o->n_stops, .ids = ids};
    q.place = (int)(p - b->places);
    q.sampler = p->q.sampler;
    q.sampler->sampling = o->sampling;
    q.sampler->rng = rng_seed(o->seed);
    sequence_begin(o, b->engine, &q);
    bool scores_prompt = q.echo && q.n_top >= 0; // then all of it must be run
    if (q.echo) sequence_keep_prompt(&q, r->prompt.data, r->prompt.len);
    if (!scores_prompt) q.n_cached = common_prefix(b->engine->session, q.place, &p->q.ids, p->q.n_cached, &q.ids);
    q.timing.start = seconds();
    sequence_free(&p->q);
    p->q = q;
    p->busy = true;
    p->waits = !scores_prompt;
    p->order = b->n_results++;
    b->results = reserve(b->results, (size_t)b->n_results, &b->results_cap, sizeof *b->results, "results");
    b->results[p->order] = (Result){.n_rows = q.ids.len};
    return true;
}

// Lines are written whole, so that a run that was ended by force leaves at most one in pieces.
static void batch_write(Batch *b, Text *line) {
    if (fwrite(line->data, 1, line->len, b->out) != line->len || fflush(b->out))
        die("%s: cannot write: %s", b->output ? b->output : "standard output", strerror(errno));
    free(line->data);
    *line = (Text){0};
}

// A sequence is done: its place is free, its line is written as soon as it is its turn.
static void batch_finish(Batch *b, Place *p) {
    Result *result = &b->results[p->order];
    batch_head(&result->line, &p->request);
    json_sequence(&result->line, b->options, b->engine, &p->q, true, p->request.options.seed);
    result->n_rows += max_int(0, p->q.n_made - 1);
    b->n_tokens += p->q.n_made;
    b->n_steps += p->q.timing.n_steps;
    b->n_drafted += p->q.timing.n_drafted;
    b->n_accepted += p->q.timing.n_accepted;
    b->n_done++;
    p->busy = false;
    request_free(&p->request);
    if (b->options->unordered) batch_write(b, &result->line);
    else
        for (; b->n_written < b->n_results && b->results[b->n_written].line.len; b->n_written++)
            batch_write(b, &b->results[b->n_written].line);
}

// On a terminal a line that changes, elsewhere a line now and then.
static void batch_progress(Batch *b, bool last) {
    bool terminal = isatty(STDERR_FILENO);
    double now = seconds();
    if (!last && now - b->shown < (terminal ? 0.2 : 10)) return;
    b->shown = now;
    fprintf(stderr, "%s%d of %d done, %lld tokens, %.1f tokens/s", terminal ? "\r\033[K\033[?7l" : "", b->n_done,
            b->n_total, b->n_tokens, (double)b->n_tokens / (now - b->start));
    if (b->n_wrong) fprintf(stderr, ", %d bad", b->n_wrong);
    if (terminal) fputs("\033[?7h", stderr); // a narrow one cuts the line off and does not wrap it
    if (last || !terminal) fputs("\n", stderr);
    fflush(stderr);
}

// --resume: what an earlier run has written counts, but for a last line that was cut off. What is not of this input is
// refused, and left as it is.
static void batch_resume(Batch *b, int n_lines) {
    static const char begin[] = "{\"line\": ";
    Text *heads = alloc((size_t)n_lines + 1, sizeof *heads, "lines"); // how a result begins; empty: the line has none
    Text earlier = read_text_file(b->output), wrong = {0};
    Lines input = b->input;
    for (String line; lines_next(&input, &line); wrong.len = 0) {
        Request r;
        batch_parse(b, input.number, line, &r, &wrong);
        if (!wrong.len) batch_head(&heads[input.number], &r);
        request_free(&r);
    }
    size_t at = 0, end = earlier.len;
    text_append(&earlier, "", 1); // ends it
    for (int i = 1; at < end; i++) {
        const char *line = earlier.data + at, *stop = memchr(line, '\n', end - at);
        size_t len = stop ? (size_t)(stop - line) : end - at;
        bool ours = !strncmp(line, begin, len < sizeof begin ? len : sizeof begin - 1);
        long number = ours && len >= sizeof begin ? strtol(line + sizeof begin - 1, NULL, 10) : 0;
        Text head = number > 0 && number <= n_lines ? heads[number] : (Text){0};
        if (!stop && ours && (!head.len || !memcmp(line, head.data, len < head.len ? len : head.len))) break;
        if (!head.len || b->known[number] || len < head.len || memcmp(line, head.data, head.len))
            die("%s: line %d: expected another result of %s, got '%.*s'", b->output, i, b->name,
                shown((String){line, len}), line);
        b->known[number] = true;
        b->n_done++;
        at += len + 1;
    }
    if (truncate(b->output, (off_t)at)) die("%s: cannot cut off a partial line: %s", b->output, strerror(errno));
    for (int i = 0; i <= n_lines; i++) free(heads[i].data);
    free(heads);
    free(earlier.data);
    free(wrong.data);
}

// Read the input, and what an earlier run has written.
static void batch_read(Batch *b, const Options *o) {
    const char *file = o->file && strcmp(o->file, "-") ? o->file : NULL;
    const char *suffix = o->file ? strrchr(o->file, '.') : NULL;
    bool named = suffix && !strncmp(suffix, ".json", 5); // .jsonl, too
    struct stat in, out;
    b->options = o;
    b->output = o->output && strcmp(o->output, "-") ? o->output : NULL;
    bool exists = b->output && !stat(b->output, &out), has_file = !o->prompt && !stat(file ? file : "/dev/stdin", &in);
    if (exists && has_file && in.st_dev == out.st_dev && in.st_ino == out.st_ino)
        die_usage("--output: %s is the file with the prompts", b->output);
    if (o->resume && exists && !S_ISREG(out.st_mode))
        die_usage("--resume: expected a regular file as --output, got %s", b->output);
    if (o->resume && !b->output) die_usage("--resume: expected --output FILE, which an earlier run has begun");
    if (!o->prompt && !o->file && !stdin_is_redirected())
        die_usage("batch: expected prompts in --file or standard input, one a line");
    b->name = o->prompt ? "--prompt" : file ? file : "standard input";
    b->input.text = read_prompt(o, true);
    Lines lines = b->input;
    for (String line; lines_next(&lines, &line);)
        if (b->n_total++ == 0) b->guessed = !named && line.text[strspn(line.text, " \t")] == '{';
    b->json = named || b->guessed;
    b->known = alloc((size_t)lines.number + 1, sizeof *b->known, "lines");
    if (o->resume && exists) batch_resume(b, lines.number);
    if (b->n_done && !o->seed_given && o->sampling.temperature > 0)
        fprintf(stderr, "run: note: without --seed the rest gets another seed than what is there\n");
}

// The figures of a batch, and what static batching would have spent: n sequences at a time, in step from the end of the
// shortest prompt on, each group until its last sequence is done (Meta's Llama 2, generate). A longer prompt is read
// token by token meanwhile, and a sequence that is done keeps computing for nothing.
static void batch_print_stats(const Batch *b) {
    const Engine *e = b->engine;
    long long useful = 0, all = 0;
    double took = seconds() - b->start;
    for (int i = 0; i < b->n_results && !interrupted; i += b->n_places) {
        int n = min_int(b->n_places, b->n_results - i), longest = 0;
        for (int k = i; k < i + n; k++) {
            longest = max_int(longest, b->results[k].n_rows);
            useful += b->results[k].n_rows;
        }
        all += (long long)n * longest;
    }
    print_load(e);
    fprintf(stderr, "throughput       %.1f tokens/s made, %.1f rows/s, in %.2f s\n", (double)b->n_tokens / took,
            (double)e->n_rows / took, took);
    fprintf(stderr, "rows             %lld computed by continuous batching%s, %lld shared\n", e->n_rows,
            e->n_draft ? " (drafts included)" : "", b->n_shared);
    if (all)
        fprintf(stderr, "static batching  %lld rows in batches of %d, of which %lld wasted (%.0f%%)\n", all,
                b->n_places, all - useful, 100.0 * (double)(all - useful) / (double)all);
    if (e->n_draft && b->n_steps) print_speculation(b->n_tokens, b->n_steps, b->n_accepted, b->n_drafted);
    print_memory(e, b->seed);
}

// Steps until all requests are done.
static void batch_run(Batch *b) {
    Sequence **running = alloc((size_t)b->n_places, sizeof(Sequence *), "batch");
    while (!interrupted) {
        int n = 0;
        for (int i = 0; i < b->n_places; i++) {
            Place *p = &b->places[i];
            if (!p->busy && !batch_admit(b, p)) continue;
            if (p->waits) p->waits = !batch_share(b, p);
            if (p->waits) continue;
            int k = n++; // who came first reads first
            for (; k > 0 && b->places[running[k - 1]->place].order > p->order; k--) running[k] = running[k - 1];
            running[k] = &p->q;
        }
        if (n == 0) break;
        step(b->engine, running, n);
        for (int i = 0; i < n; i++)
            if (running[i]->done) batch_finish(b, &b->places[running[i]->place]);
        batch_progress(b, false);
    }
    free(running);
}

static int mode_batch(const Options *o) {
    if (o->draft) die_usage("--draft: is not for a batch, whose rows are many already (--lookup is)");
    Engine e = {0};
    Batch b = {.engine = &e, .seed = choose_seed(o), .out = stdout};
    batch_read(&b, o);
    engine_load(&e, o, true);
    b.n_places = max_int(1, min_int(o->batch, b.n_total - b.n_done));
    int n_ctx = choose_context(o, &e.model->config);
    engine_open(&e, o, n_ctx, b.n_places, n_ctx);
    if (b.output && !(b.out = fopen(b.output, o->resume ? "ab" : "wb")))
        die("%s: cannot open: %s", b.output, strerror(errno));
    b.places = alloc((size_t)b.n_places, sizeof *b.places, "batch");
    for (int i = 0; i < b.n_places; i++)
        b.places[i].q.sampler = sampler_open(o->sampling, 0, e.model->config.vocab_size);
    catch_interrupt();
    b.start = b.shown = seconds();
    batch_run(&b);
    batch_progress(&b, true);
    if (interrupted && b.output) fprintf(stderr, "run: interrupted: --resume goes on\n");
    if (o->stats) batch_print_stats(&b);
    for (int i = 0; i < b.n_places; i++) {
        if (b.places[i].busy) request_free(&b.places[i].request);
        sampler_free(b.places[i].q.sampler);
        sequence_free(&b.places[i].q);
    }
    for (int i = 0; i < b.n_results; i++) free(b.results[i].line.data);
    if (b.output && fclose(b.out)) die("%s: cannot write: %s", b.output, strerror(errno));
    free(b.places);
    free(b.results);
    free(b.known);
    free(b.input.text.data);
    engine_free(&e);
    return interrupted ? 130 : b.n_wrong ? 1 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §26 Bench
//
// How fast is it, and how fast could it be? Decoding reads every weight once for each token, so its limit is a plain
// read of as many bytes; reading a prompt does a multiply-add for each weight and token, so its limit is the peak of
// that instruction. A batch is bound by both: a step takes at least the longer of the two times.
//
// Machines are noisy, and the speed of memory drifts by a factor of two: only a share of limits measured at the same
// moment says anything. So both limits and what they limit take turns, a few milliseconds each, until each has had its
// time. A figure is the median of some rounds, shown with their spread, and so is its share: the median of the ratios,
// not the ratio of the medians.

enum { BENCH_ROUNDS = 5, BENCH_SEQS = 16, BENCH_FAR = 2000, BENCH_STEPS = 12 };

static const double BENCH_SECONDS = 0.02; // each measurement takes as long, at least

// What is measured: limits first, then a prompt of n tokens, n sequences in step, one whose cache is nearly full.
typedef enum { PEAK, READ, PREFILL, DECODE, DECODE_FAR } FigureKind;

static const struct {
    const char *name; // %d: the position
    FigureKind kind;
    int n;
} figures[] = {{"peak", PEAK, 1},
               {"read", READ, 1},
               {"prefill_16", PREFILL, 16},
               {"prefill_128", PREFILL, 128},
               {"prefill_512", PREFILL, 512},
               {"decode", DECODE, 1},
               {"decode_at_%d", DECODE_FAR, 1},
               {"batch_1", DECODE, 1},
               {"batch_4", DECODE, 4},
               {"batch_8", DECODE, 8},
               {"batch_16", DECODE, 16}};
enum { N_FIGURES = sizeof figures / sizeof *figures };

// All numbers are per second: operations, bytes or tokens.
typedef struct {
    Engine engine;
    int *ids; // some text
    int far;
    double bytes;       // of weights that a token reads
    double operations;  // for a token. A multiply-add counts as two; the output is left out: a prompt needs it once
    double cache_bytes; // of keys and values, which all later tokens read
    double rounds[N_FIGURES][BENCH_ROUNDS];
    double peaks[N_FIGURES][BENCH_ROUNDS], reads[N_FIGURES][BENCH_ROUNDS]; // measured beside it
    double limits[N_FIGURES][BENCH_ROUNDS];                                // what these allow
} Bench;

// A sum in 16 lanes, so that only memory limits it.
static uint32_t read_words(const uint32_t *words, size_t n) {
    uint32_t lane[16] = {0}, sum = 0;
    for (size_t i = 0; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lane[j] += words[i + (size_t)j];
    for (int j = 0; j < 16; j++) sum += lane[j];
    return sum;
}

// One thread's part of the panels and scales of a matrix.
static uint32_t read_matrix(const Matrix *w, int thread, int n_threads) {
    size_t n = matrix_panels(w), first = n * (size_t)thread / (size_t)n_threads;
    size_t count = n * (size_t)(thread + 1) / (size_t)n_threads - first;
    size_t scale_words = scale_layout(w).panel / 4;
    uint32_t sum = read_words((const uint32_t *)w->panels + first * panel_words(w), count * panel_words(w));
    if (w->scales) sum += read_words((const uint32_t *)w->scales + first * scale_words, count * scale_words);
    return sum;
}

// Read what a decoded token reads, each thread its own stretch of each matrix. Returns how many bytes that is.
static double read_weights(const Model *m, int n_threads) {
    uint32_t sum = 0;
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : sum)
    for (int thread = 0; thread < n_threads; thread++) EACH_TENSOR(m, t, l) {
            const Matrix *w = tensor_matrix(m, t, l);
            if (w && w != &m->embed) sum += read_matrix(w, thread, n_threads);
        }
    volatile uint32_t used = sum; // or the compiler may leave out all of it
    (void)used;
    return (double)model_bytes_per_token(m);
}

// n rounds of independent multiply-adds from registers, as fast as the instruction of a type goes. Returns how many
// operations that was. What it begins with and what it ends with are volatile: so the compiler can neither foresee nor
// drop it. The type is a constant where it is inlined.
ALWAYS_INLINE double multiply_add(Type type, int n) {
    enum { CHAINS = LANES == 16 ? 16 : 12 }; // with x they fit into the registers
    volatile float seed = 1.5f;
    Floats floats[CHAINS], x = floats_set(seed);
    Ints ints[CHAINS], q = ints_set((int32_t)seed);
    UNROLL for (int i = 0; i < CHAINS; i++) {
        floats[i] = floats_set((float)i);
        ints[i] = ints_set(i);
    }
    for (int round = 0; round < n; round++) {
        UNROLL for (int i = 0; i < CHAINS; i++) {
            if (type == I8) ints[i] = ints_dot_int8(ints[i], ints[i], q);
            else if (type == BF16) floats[i] = floats_dot_bf16(floats[i], q, q);
            else floats[i] = floats_fma(x, x, floats[i]);
        }
    }
    UNROLL for (int i = 1; i < CHAINS; i++) floats[0] = floats_fma(floats[i], floats_from_ints(ints[i]), floats[0]);
    volatile float used = floats[0][0];
    (void)used;
    return 2.0 * n * CHAINS * LANES * (type == I8 ? 4 : type == BF16 ? 2 : 1);
}

static double multiply_adds(Type type, int n_threads) {
    enum { N = 300000 };
    double n = 0;
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : n)
    for (int i = 0; i < n_threads; i++)
        n += is_quantized(type) ? multiply_add(I8, N) : multiply_add(type == BF16 ? BF16 : F32, N);
    return n;
}

// Runs figure i once. Returns how many of its units that was.
static double figure_do(const Bench *b, int i) {
    Session *s = b->engine.session;
    FigureKind kind = figures[i].kind;
    int n = figures[i].n, pos = kind == DECODE_FAR ? b->far : 0;
    if (kind == PEAK) return multiply_adds(s->model->layers[0].q.type, s->n_threads);
    if (kind == READ) return read_weights(s->model, s->n_threads);
    if (kind == PREFILL) return prefill(s, b->ids, n, 0, 0) ? n : 0;
    for (int step = 0; step < BENCH_STEPS; step++) {
        for (int r = 0; r < n; r++) s->rows[r] = (Row){b->ids[step + r], pos + step, r, true};
        forward(s, s->rows, n);
    }
    return n * BENCH_STEPS;
}

// Measures a figure and both limits in turn, and what these would allow it.
static void figure_measure(Bench *b, int i, int round) {
    const int all[] = {PEAK, READ, i};
    double done[3] = {0}, took[3] = {0};
    while (fmin(fmin(took[0], took[1]), took[2]) < BENCH_SECONDS)
        for (int k = 0; k < 3; k++) {
            if (took[k] >= BENCH_SECONDS) continue;
            double start = seconds();
            done[k] += figure_do(b, all[k]);
            took[k] += seconds() - start;
        }
    for (int k = 0; k < 3; k++) b->rounds[all[k]][round] = done[k] / took[k];
    double peak = b->peaks[i][round] = b->rounds[PEAK][round], read = b->reads[i][round] = b->rounds[READ][round];
    double n = figures[i].n, far = figures[i].kind == DECODE_FAR ? b->far : 0;
    double bytes = figures[i].kind == PREFILL ? 0 : b->bytes + far * b->cache_bytes;
    b->limits[i][round] = n / fmax(bytes / read, n * b->operations / peak);
}

// The median of the rounds, and how far they are apart, as a share of it.
static double median(const double *rounds, double *spread) {
    double sorted[BENCH_ROUNDS];
    memcpy(sorted, rounds, sizeof sorted);
    qsort(sorted, BENCH_ROUNDS, sizeof *sorted, compare_doubles);
    double middle = sorted[BENCH_ROUNDS / 2];
    *spread = (sorted[BENCH_ROUNDS - 1] - sorted[0]) / middle;
    return middle;
}

// A list of a figure in each round, as a member of an object.
static void print_list(const char *name, const double *x, double unit) {
    printf(", \"%s\": [", name);
    for (int i = 0; i < BENCH_ROUNDS; i++) printf(i ? ", %.6g" : "%.6g", x[i] / unit);
    printf("]");
}

// One figure: its value; for a prompt also the time to its first token; for what has a limit, its share of it.
static void print_figure(const Bench *b, int i, bool json) {
    FigureKind kind = figures[i].kind;
    bool prompt = kind == PREFILL, limited = kind >= PREFILL, alone = limited && figures[i].n == 1;
    const char *rate_unit = kind == PEAK || prompt ? "GOP/s" : "GB/s", *unit = limited ? "tokens/s" : rate_unit;
    double scale = limited ? 1 : 1e9, spread, unused, shares[BENCH_ROUNDS];
    double value = median(b->rounds[i], &spread) / scale, first = figures[i].n / value;
    double rate = value * (prompt ? b->operations : b->bytes) / 1e9;
    char name[32];
    snprintf(name, sizeof name, figures[i].name, b->far);
    for (int round = 0; round < BENCH_ROUNDS; round++) shares[round] = b->rounds[i][round] / b->limits[i][round];
    double share = median(shares, &unused);
    if (json) printf(", \"%s\": {\"%s\": %.6g", name, limited ? "tokens_per_second" : unit, value);
    else printf("%-16s %8.1f %s ± %.0f%%", name, value, unit, 50 * spread);
    if (kind == PEAK) printf(json ? ", \"type\": \"%s\"" : " (%s)", type_name(b->engine.model->layers[0].q.type));
    if ((prompt || alone) && json) printf(", \"%s\": %.6g", rate_unit, rate);
    if ((prompt || alone) && !json) printf(" = %.1f %s", rate, rate_unit);
    if (limited) printf(json ? ", \"share_of_limit\": %.6g" : ", %.0f%% of the limit", json ? share : 100 * share);
    if (prompt)
        printf(json ? ", \"first_token_seconds\": %.6g" : ", first token after %.1f ms", first * (json ? 1 : 1e3));
    if (limited && json) {
        print_list("limits", b->limits[i], scale);
        print_list("peak", b->peaks[i], 1e9);
        print_list("read", b->reads[i], 1e9);
    }
    if (json) print_list("rounds", b->rounds[i], scale);
    if (json) printf(", \"spread\": %.6g}", spread);
    else printf("\n");
}

static void bench_open(Bench *b, const Options *o) {
    Engine *e = &b->engine;
    engine_load(e, o, false);
    const Config *c = &e->model->config;
    int n_ctx = min_int(o->context ? o->context : c->n_ctx_train, BENCH_FAR + BENCH_STEPS);
    if (n_ctx < 3 * BENCH_STEPS)
        die_usage("bench: expected a context of at least %d (--context), got %d", 3 * BENCH_STEPS, n_ctx);
    e->session = session_open(e->model, choose_kv_type(o, e->model), n_ctx, BENCH_SEQS, max_int(o->chunk, BENCH_SEQS),
                              BENCH_SEQS, e->n_threads);
    b->far = n_ctx - BENCH_STEPS;
    b->ids = alloc((size_t)n_ctx + BENCH_SEQS, sizeof *b->ids, "bench");
    for (int i = 0; i < n_ctx + BENCH_SEQS; i++) b->ids[i] = (int)((i * 7919LL + 3) % c->vocab_size);
    b->bytes = (double)model_bytes_per_token(e->model);
    b->cache_bytes = (double)cache_token_bytes(c, e->session->kv_type);
    for (const Tensor *t = tensors; t < tensors + N_TENSORS; t++)
        if (t->in_layer && t->rows != VECTOR)
            b->operations += 2.0 * c->n_layers * dim_of(c, t->rows) * dim_of(c, t->cols);
}

static int mode_bench(const Options *o) {
    Bench b = {0};
    bench_open(&b, o);
    prefill(b.engine.session, b.ids, b.far, 0, 0);
    for (int round = 0; round < BENCH_ROUNDS; round++)
        for (int i = PREFILL; i < N_FIGURES; i++)
            if (figures[i].kind != PREFILL || figures[i].n <= b.engine.session->n_ctx) figure_measure(&b, i, round);
    const char *head =
        o->json ? "{\"load_seconds\": %.4f, \"memory_mib\": %.1f, \"threads\": %d, \"bytes_per_token\": %.0f, "
                  "\"operations_per_token\": %.0f, \"cache_bytes_per_token\": %.0f"
                : "load             %8.3f s\npeak memory      %8.0f MiB\nthreads          %8d\n";
    printf(head, b.engine.load_seconds, peak_memory_mib(), b.engine.n_threads, b.bytes, b.operations, b.cache_bytes);
    for (int i = 0; i < N_FIGURES; i++)
        if (b.rounds[i][0] > 0) print_figure(&b, i, o->json);
    if (o->json) printf("}\n");
    free(b.ids);
    engine_free(&b.engine);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §27 Command line
//
// Reads the options, and calls the mode. What there is to read and to say is in the table of §16.

static int (*const modes[N_MODES])(const Options *) = {mode_generate,   mode_chat,  mode_tokenize, mode_info,
                                                       mode_perplexity, mode_batch, mode_bench}; // of mode_words

static void print_help(void) {
    printf("run %s: inference of Llama-family models\n\n", RUN_VERSION);
    printf("usage: run MODEL [options], as in: run model.gguf -i \"Once upon a time\" -n 100\n");
    for (const Option *o = options; o < options + N_OPTIONS; o++) {
        char letter[4] = "   ", left[64];
        Text words = {0};
        if (o->words) text_append_words(&words, o->words);
        text_append(&words, "", 1); // ends it
        if (o->group) printf("%s:\n", o->group);
        if (o->letter) snprintf(letter, sizeof letter, "-%c,", o->letter);
        snprintf(left, sizeof left, "%s --%s %s", letter, o->name, o->argument ? o->argument : "");
        printf("  %-26s ", left);
        printf(o->help, words.data);
        printf(o->initial ? " (%s)\n" : "\n", o->initial);
        free(words.data);
    }
    printf("Without -i and -f, redirected standard input is the prompt. Text goes to standard output, all else\n"
           "to standard error. Exit code: 0 done, 1 bad data or failure, 2 bad usage, 130 after Ctrl-C.\n");
}

// Whether so many edits of single characters turn a[0..n) into b (Levenshtein).
static bool within_edits(const char *a, size_t n, const char *b, int edits) {
    for (; n > 0 && *a == *b; n--, a++) b++;
    if (n == 0 && !*b) return true;
    if (edits == 0) return false;
    return (n > 0 && within_edits(a + 1, n - 1, b, edits - 1)) || (*b && within_edits(a, n, b + 1, edits - 1)) ||
           (n > 0 && *b && within_edits(a + 1, n - 1, b + 1, edits - 1));
}

// name: [n] what is after the dashes. Where it is nearly that of an option, that is what was meant.
static noreturn void unknown_option(const char *argument, const char *name, size_t n) {
    for (int edits = 0; n > 1 && n < 32 && edits <= max_int(2, (int)n / 3); edits++)
        for (const Option *o = options; o < options + N_OPTIONS; o++)
            if (within_edits(name, n, o->name, edits))
                die_usage("unknown option %s, did you mean --%s?", argument, o->name);
    die_usage("unknown option %s (run -h lists them)", argument);
}

// The option that argument names, `--name`, `--name=value`, `-x` or `-xvalue`. *value: the value in it, or NULL.
static const Option *option_find(const char *argument, const char **value) {
    bool is_long = argument[1] == '-';
    const char *name = argument + 1 + is_long;
    size_t n = is_long ? strcspn(name, "=") : strlen(name);
    const Option *found = NULL;
    for (const Option *o = options; o < options + N_OPTIONS; o++) {
        bool named = strlen(o->name) == n && !memcmp(o->name, name, n);
        if (named && !is_long) unknown_option(argument, name, n); // -top-p is a slip, not -t with the value op-p
        if (named || (!is_long && o->letter == *name)) found = o;
    }
    if (!found) unknown_option(argument, name, n);
    const char *rest = name + (is_long ? n : 1);
    *value = *rest ? rest + is_long : NULL;
    return found;
}

static void set_or_die(Options *o, const Option *option, const char *value) {
    Text wrong = {0};
    if (!option_set(o, option, value, &wrong)) die_usage("--%s: %.*s", option->name, (int)wrong.len, wrong.data);
}

static Options parse_options(int argc, char **argv) {
    Options o = {.kv = -1, .rope_scaling = -1, .template = -1, .n_tokens = -1, .logprobs = -1};
    o.stops = alloc((size_t)argc + 1, sizeof *o.stops, "options");
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].initial) set_or_die(&o, &options[i], options[i].initial);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-' || !argv[i][1]) {
            if (o.checkpoint)
                die_usage("expected one checkpoint, got '%s' and '%s' (a prompt goes after -i)", o.checkpoint, argv[i]);
            o.checkpoint = argv[i];
            continue;
        }
        const char *value = NULL;
        const Option *option = option_find(argv[i], &value);
        if (option->kind == FLAG && value) die_usage("--%s: expected no value, got '%s'", option->name, value);
        if (option->kind != FLAG && !value) {
            if (i + 1 >= argc) die_usage("--%s: expected %s after it, got nothing", option->name, option->argument);
            value = argv[++i];
        }
        set_or_die(&o, option, value ? value : "");
    }
    return o;
}

static void check_options(const Options *o) {
    bool batch = o->mode == MODE_BATCH, reads = o->mode == MODE_TOKENIZE || o->mode == MODE_PERPLEXITY;
    if (o->think && o->no_think) die_usage("--think and --no-think: expected one of the two, got both");
    if (o->prompt && o->file) die_usage("--prompt and --file: expected one of the two, got both");
    if (o->draft && o->lookup) die_usage("--draft and --lookup: expected one of the two, got both");
    if ((o->output || o->resume || o->unordered) && !batch)
        die_usage("--output, --resume and --unordered: are for -m batch, got -m %s", mode_words[o->mode]);
    if (o->echo && o->mode == MODE_CHAT) die_usage("--echo: is for generate --json and batch");
    if (o->logprobs >= 0 && !o->json && !batch)
        die_usage("--logprobs: expected --json with it, where they can be printed");
    if (o->rope_factor && o->rope_scaling < 0) die_usage("--rope-factor: expected --rope-scaling with it");
    if (o->rope_scaling >= 0 && !o->rope_factor) die_usage("--rope-scaling: expected --rope-factor with it");
    if (reads && !o->prompt && !o->file && !stdin_is_redirected())
        die_usage("-m %s: expected a text in --prompt, --file or standard input", mode_words[o->mode]);
}

int main(int argc, char **argv) {
    Options o = parse_options(argc, argv);
    int status = 0;
    check_options(&o);
    if (o.help) print_help();
    else if (o.version) printf("run %s\n", RUN_VERSION);
    else status = modes[o.mode](&o);
    write_out("", 0); // nothing may stay unwritten unnoticed
    free(o.stops);
    return status;
}
