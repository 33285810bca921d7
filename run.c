/* run.c: inference of Llama-family language models on a CPU, in one file.

   A language model reads a list of tokens (numbered pieces of text) and gives every entry of its vocabulary a
   score, the logit, for being the next one. Drawing from these scores, appending the draw and asking again writes text.
   This file does that: it opens a checkpoint, turns a prompt into tokens, runs the transformer, samples, prints.

       ./run model.bin -i "Once upon a time"

   It needs libc, libm and, for several threads, OpenMP. `./run -h` lists the options.

   MAP. The sections stand bottom-up: each calls only those above it.

       §1  basics         errors, memory, files, the Reader through which every byte of a file passes
       §2  number formats how weights lie in memory; how activations become int8 and bf16
       §3  model          Config, Matrix, Layer, Model
       §4  kernels        the matrix product: one shape of loop for every type and every instruction set
       §5  layers         rmsnorm, softmax, rope, swiglu: the small functions of the papers
       §6  session        what changes while running: key/value cache, activations, threads
       §7  forward        rows in, logits out: the transformer
       §8  packing        the number formats of files; their rows become panels
       §9  GGUF           reading the files of the llama.cpp world
       §10 checkpoints    llama2.c's files, flat ones; which format a file has
       §11 words          characters, and the patterns that cut a text before BPE
       §12 tokenizer      text to token ids and back
       §13 vocabularies   the tokenizers of both kinds of file
       §14 sampler        logits to the next token
       §15 chat templates roles to ids
       §16 terminal       a line to type into
       §17 sequences      the loop: many texts, each a token further; drafts, scores, sliding
       §18 generation     options and prompt in, text or JSON out
       §19 inspection     tokenize, info, perplexity
       §20 chat           a conversation, its commands and its file
       §21 requests       JSON Lines in
       §22 batch          thousands of prompts, some at a time
       §23 bench          speed, beside the limits of the machine
       §24 command line   one table of options drives parsing, help and man page

   In a hurry? Read §3 (what a model is), §7 (what it computes) and §17 (the loop around it). §2 to §7 are the engine;
   what follows reads files and talks to people.

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
static int omp_get_thread_num(void) {
    return 0;
}
static int omp_get_num_threads(void) {
    return 1;
}
#endif

#define RUN_VERSION "0.1"

// ---------------------------------------------------------------------------------------------------------------------
// §1 Basics
//
// Errors, memory, files. Two rules hold everywhere: a failure is one line on stderr that names the file or option, what
// was expected and what was found, and ends the process (1: bad data or failure, 2: bad usage); and a number that comes
// from a file or the user is checked before it sizes or indexes anything. An assert is for our own mistakes only.

// Bytes of the UTF-8 character that a lead byte announces: 1 to 4; 0 for a byte that cannot begin one.
static int utf8_length(uint8_t lead) {
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead < 0xE0) return 2;
    if (lead >= 0xE0 && lead < 0xF0) return 3;
    if (lead >= 0xF0 && lead < 0xF5) return 4;
    return 0;
}

// How the n bytes at text begin: with a complete character (returns its length), with a part of one that more bytes
// could complete (returns 0), or with neither (returns -1). Ref: Unicode 15, table 3-7.
static int utf8_scan(const char *text, size_t n) {
    const uint8_t *b = (const uint8_t *)text;
    int len = utf8_length(b[0]);
    if (len == 0) return -1;
    if (n > 1 && len > 1) { // the second byte's range excludes overlong forms, surrogates and what lies past U+10FFFF
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

static int min_int(int a, int b) {
    return a < b ? a : b;
}

static int max_int(int a, int b) {
    return a > b ? a : b;
}

// n rounded up to a multiple of m.
static size_t pad(size_t n, size_t m) {
    return (n + m - 1) / m * m;
}

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

// A growing run of bytes: a prompt, a piece of output. May hold zero bytes.
typedef struct {
    char *data;
    size_t len, cap;
} Text;

static void text_append(Text *t, const void *bytes, size_t n) {
    if (n > t->cap - t->len) {
        size_t cap = pad(t->len + n, 64) * 2;
        char *grown = realloc(t->data, cap);
        if (!grown) die("out of memory: a text of %zu bytes", t->len + n);
        t->data = grown;
        t->cap = cap;
    }
    if (n) memcpy(t->data + t->len, bytes, n);
    t->len += n;
}

__attribute__((format(printf, 2, 3))) static void text_format(Text *t, const char *format, ...) {
    va_list args;
    char piece[512];
    va_start(args, format);
    int n = vsnprintf(piece, sizeof piece, format, args);
    va_end(args);
    assert(n >= 0 && n < (int)sizeof piece);
    text_append(t, piece, (size_t)n);
}

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

// A file as read-only memory.
typedef struct {
    const char *path;
    const uint8_t *data;
    size_t size;
} Mapping;

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

// The cursor. Whatever is read from a file goes through reader_take, which refuses to step past the end: no other code
// needs to know how long the file is. Values may lie at any alignment, so they are copied out, never pointed at.
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

static float reader_f32(Reader *r, const char *what) {
    float value;
    memcpy(&value, reader_take(r, sizeof value, what), sizeof value);
    return value;
}

static uint32_t reader_u32(Reader *r, const char *what) {
    return (uint32_t)reader_i32(r, what);
}

static uint64_t reader_u64(Reader *r, const char *what) {
    uint64_t value;
    memcpy(&value, reader_take(r, sizeof value, what), sizeof value);
    return value;
}

static double reader_f64(Reader *r, const char *what) {
    double value;
    memcpy(&value, reader_take(r, sizeof value, what), sizeof value);
    return value;
}

// n floats, copied.
static float *reader_f32_array(Reader *r, size_t n, const char *what) {
    const uint8_t *bytes = reader_take(r, product(n, sizeof(float), what), what);
    return memcpy(alloc(n, sizeof(float), what), bytes, n * sizeof(float));
}

// A binary heap: the entry with the highest score on top, the lowest index among equals. The tokenizer takes its merges
// from one, top-k its candidates: both want the best few of many in order, without sorting the many.
typedef struct {
    float score;
    int index, len; // len: for the tokenizer
} Ranked;

static bool ranks_before(Ranked a, Ranked b) {
    return a.score > b.score || (a.score == b.score && a.index < b.index);
}

static void heap_sift_down(Ranked *heap, int n, int i) {
    Ranked moving = heap[i];
    for (int child; (child = 2 * i + 1) < n; i = child) {
        if (child + 1 < n && ranks_before(heap[child + 1], heap[child])) child++;
        if (!ranks_before(heap[child], moving)) break;
        heap[i] = heap[child];
    }
    heap[i] = moving;
}

static void heap_build(Ranked *heap, int n) {
    for (int i = n / 2 - 1; i >= 0; i--) heap_sift_down(heap, n, i);
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

// --- how many threads: one for each physical core that this process may use. Two threads on one core share its
// arithmetic and only get in each other's way, and threads beyond a container's quota are stopped in mid-stride.

#ifndef _OPENMP
static int default_threads(void) {
    return 1;
}
#elif defined(__linux__)
// The first number in a small file of the kernel's, or -1.
static long first_number(const char *path) {
    FILE *file = fopen(path, "r");
    long n = -1;
    if (file && fscanf(file, "%ld", &n) != 1) n = -1;
    if (file) fclose(file);
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
        FILE *file = fopen(name, "r");
        if (file && fscanf(file, "%ld %ld", &quota, &period) == 2 && period > 0)
            allowed = min_int(allowed, max_int(1, (int)(quota / period)));
        if (file) fclose(file);
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
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list", cpu);
        long lowest = first_number(path);
        if (lowest < 0 || lowest == cpu || lowest >= CPU_SETSIZE || !CPU_ISSET((int)lowest, &allowed)) cores++;
    }
    char group[512] = "";
    FILE *file = fopen("/proc/self/cgroup", "r"); // the line of version 2 is "0::/path"
    if (file && fscanf(file, "0::%511s", group) != 1) group[0] = 0;
    if (file) fclose(file);
    return max_int(1, min_int(cores, cgroup_processors(group)));
}
#else
static int default_threads(void) {
    return max_int(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// §2 Number formats
//
// How numbers lie in memory. A checkpoint stores a weight matrix row by row. The kernels of §4 want to multiply one
// activation with many weights at once, so that the lanes of a vector register are different *outputs*: then nothing is
// ever added across lanes, and each output adds its products in the order of the columns, whatever the vector width. So
// every matrix is rearranged while loading, 16 rows at a time, into
//
//   THE PANEL                     row 0     row 1     row 2           row 15
//                 step 0       [ 4 bytes | 4 bytes | 4 bytes | ... | 4 bytes ]     <- one 64-byte cache line
//                 step 1       [ 4 bytes | 4 bytes | 4 bytes | ... | 4 bytes ]
//                 ...
//                 last step    [ 4 bytes | 4 bytes | 4 bytes | ... | 4 bytes ]
//
// A 4-byte step of a row holds as many columns as fit: 1 float, 2 halves (f16 or bf16, the lower column in the lower
// half), 4 int8, or 8 int4 (byte j holds column j in its low and column j + 4 in its high four bits). Panel follows
// panel; the last one is padded with rows of zeros.
//
// QUANTISATION. A group of neighbouring weights shares a scale and perhaps a minimum, and keeps a small integer each:
//
//     w = scale * (q - zero) + minimum
//
// int8: q in -128..127, zero 0. int4: q in 0..15, zero 0 or 8. The products q_w * q_x of two groups are summed
// exactly, in integers, and only the sum meets the scales. Scales and minima lie beside the panels,
// [panel][group][16], as f16 where the file has f16, else as f32: nothing is lost. Activations are quantised on the
// fly in blocks of 32 (quantize_block).

typedef enum { F32, F16, BF16, I8, I4 } Type;

static const char *type_name(Type type) {
    static const char *const names[] = {"f32", "f16", "bf16", "int8", "int4"};
    return names[type];
}

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
static float float_from_bf16(uint16_t half) {
    return float_from_bits((uint32_t)half << 16);
}

// Rounds to the nearest bfloat16, ties to even.
static uint16_t bf16_from_float(float f) {
    uint32_t bits = bits_of_float(f);
    return (uint16_t)(f != f ? bits >> 16 | 0x40 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16); // NaN remains NaN
}

static inline uint32_t load_u32(const void *p) {
    uint32_t word;
    memcpy(&word, p, sizeof word);
    return word;
}

// --- activations

// Rows of activations, ready to be multiplied: as floats; rounded to bf16 where the model has such matrices; and as
// int8 where it has quantised ones. The kernels meet 6 rows at a time, so the int8 lie in strips of 6 rows: what they
// need next to each other lies next to each other. (A row that is alone is a strip of 1, and stays in the fastest cache.)
typedef struct {
    size_t stride;   // elements from one row to the next, a multiple of BLOCK
    int strip;       // rows in a strip, STRIP or 1
    float *f;        // [n_rows, stride]
    uint32_t *pairs; // [n_rows, stride / 2]   words of 2 bf16, the lower column in the lower half
    int32_t *q;      // [strips][stride / 4][strip] words of 4 int8          f is about scale * q
    float *scale;    // [strips][stride / BLOCK][strip]
    float *sum;      // [strips][stride / BLOCK][strip]              scale * (sum of q)
    int32_t *start;  // [strips][stride / BLOCK][N_STARTS][strip]    sums of q times an offset of the weights (§4)
} Activations;

// Over the first or last 16 columns of a block, or all 32, times -128 for int8; over all 32, times -8 for int4.
enum { START_FIRST, START_LAST, START_ALL, START_INT4, N_STARTS };

// Where row `row` has its entry for column k in an array with an entry for each `columns` columns.
static inline size_t strip_index(const Activations *x, int row, size_t k, size_t columns) {
    size_t strip = (size_t)x->strip;
    return ((size_t)row / strip * (x->stride / columns) + k / columns) * strip + (size_t)row % strip;
}

// Quantise 32 floats: scale = max|f| / 127 and q = round(f / scale), ties to even. An all-zero block has scale 0 and
// zeros, not 0/0. A block with a NaN or an infinity gets the scale NaN, so that the error reaches the logits and is
// reported there. What is written lies `strip` entries apart.
static void quantize_block(const float *f, size_t strip, int32_t *words, int32_t *start, float *scale, float *sum) {
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
    const int32_t starts[N_STARTS] = {-128 * first, -128 * last, -128 * (first + last), -8 * (first + last)};
    for (size_t i = 0; i < N_STARTS; i++) start[i * strip] = starts[i];
    *scale = usable ? largest / 127.0f : isfinite(largest) ? 0 : NAN;
    *sum = *scale * (float)(first + last);
}

// Make a row of floats ready: fill up its last block, and convert it to what this model's matrices are multiplied with.
static void prepare_row(const Activations *x, int row, int cols) {
    float *f = x->f + (size_t)row * x->stride;
    size_t end = pad((size_t)cols, BLOCK), strip = (size_t)x->strip;
    for (size_t i = (size_t)cols; i < end; i++) f[i] = 0;
    if (x->pairs) {
        uint32_t *pairs = x->pairs + (size_t)row * x->stride / 2;
        for (size_t i = 0; i < end / 2; i++)
            pairs[i] = bf16_from_float(f[2 * i]) | (uint32_t)bf16_from_float(f[2 * i + 1]) << 16;
    }
    if (!x->q) return;
    int32_t *words = x->q + strip_index(x, row, 0, 4), *start = x->start + strip_index(x, row, 0, BLOCK / N_STARTS);
    size_t at = strip_index(x, row, 0, BLOCK);
    for (size_t k = 0; k < end; k += BLOCK, words += BLOCK / 4 * strip, start += N_STARTS * strip, at += strip)
        quantize_block(f + k, strip, words, start, x->scale + at, x->sum + at);
}

// ---------------------------------------------------------------------------------------------------------------------
// §3 Model
//
// What a model is: a Config of hyperparameters, and for every layer four matrices for attention, three for the
// feed-forward and two norms. A Model never changes after loading; everything that does is in the Session (§6).
//
// A loader turns a file into a Model. It reads the header, checks that everything the header promises lies in the file,
// and rearranges each matrix into panels on all threads. Nothing downstream knows which format it was.

// W: [rows, cols], as panels. y = W x is what every matrix does.
typedef struct {
    Type type;
    int rows, cols;
    int group;          // I8, I4: columns that share a scale, a multiple of 16
    Type scale_type;    // of scales and mins: F16 or F32
    int zero;           // I4: what is subtracted from each q
    const void *panels; // [ceil(rows / 16)][cols / columns per step][16 rows] of 4-byte steps
    const void *scales; // I8, I4: [ceil(rows / 16)][cols / group][16]
    const void *mins;   // the same, or NULL
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
    bool rope_halves;   // the file turns pairs (i, i + head_dim / 2): q and k are rearranged while loading
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
    Mapping file;               // flat checkpoints: what all pointers above point into; else empty
} Model;

static int q_dim(const Config *c) {
    return c->n_heads * c->head_dim;
}

static int kv_dim(const Config *c) {
    return c->n_kv_heads * c->head_dim;
}

static bool is_quantized(Type type) {
    return type == I8 || type == I4;
}

// --- matrices

static size_t matrix_panels(const Matrix *w) {
    return ((size_t)w->rows + PANEL - 1) / PANEL;
}

// Columns in a 4-byte step.
static int step_columns(Type type) {
    return type == F32 ? 1 : type == I8 ? 4 : type == I4 ? 8 : 2;
}

// 4-byte words from one panel to the next.
static size_t panel_words(const Matrix *w) {
    return (size_t)(w->cols / step_columns(w->type)) * PANEL;
}

// Scales (or minima) from one panel to the next.
static size_t panel_scales(const Matrix *w) {
    return is_quantized(w->type) ? (size_t)(w->cols / w->group) * PANEL : 0;
}

static size_t scale_bytes(const Matrix *w) {
    return w->scale_type == F16 ? 2 : 4;
}

static size_t matrix_bytes(const Matrix *w) {
    return matrix_panels(w) * (panel_words(w) * 4 + panel_scales(w) * scale_bytes(w) * (w->mins ? 2 : 1));
}

static void matrix_free(Matrix *w) {
    size_t n = matrix_panels(w);
    free_pages((void *)w->panels, n, panel_words(w) * 4);
    free_pages((void *)w->scales, n, panel_scales(w) * scale_bytes(w));
    free_pages((void *)w->mins, n, panel_scales(w) * scale_bytes(w));
}

static float load_scale(const Matrix *w, const void *array, size_t at) {
    return w->scale_type == F16 ? float_from_f16(((const uint16_t *)array)[at]) : ((const float *)array)[at];
}

// One row of a matrix as floats: the embedding of a token.
static void matrix_row(float *out, const Matrix *w, int row) {
    size_t p = (size_t)row / PANEL, lane = (size_t)row % PANEL;
    int columns = step_columns(w->type);
    const uint32_t *words = (const uint32_t *)w->panels + p * panel_words(w) + lane;
    for (int k = 0; k < w->cols; k++) {
        uint32_t word = words[(size_t)(k / columns) * PANEL];
        int i = k % columns;
        if (w->type == F32) out[k] = float_from_bits(word);
        else if (w->type == F16) out[k] = float_from_f16((uint16_t)(word >> 16 * i));
        else if (w->type == BF16) out[k] = float_from_bf16((uint16_t)(word >> 16 * i));
        else {
            int q = w->type == I8 ? (int8_t)(word >> 8 * i) : (int)(word >> (8 * (i % 4) + i / 4 * 4) & 15) - w->zero;
            size_t at = p * panel_scales(w) + (size_t)(k / w->group) * PANEL + lane;
            out[k] = load_scale(w, w->scales, at) * (float)q + (w->mins ? load_scale(w, w->mins, at) : 0);
        }
    }
}

enum { LAYER_MATRICES = 7 };

// Matrix i of a layer, in the order of their use.
static Matrix *layer_matrix(const Model *m, int layer, int i) {
    Layer *a = &m->layers[layer];
    Matrix *all[LAYER_MATRICES] = {&a->q, &a->k, &a->v, &a->o, &a->gate, &a->up, &a->down};
    return all[i];
}

// Everything that a decoded token has to read: all matrices but the embedding, of which it reads one row.
static size_t model_bytes_per_token(const Model *m) {
    size_t bytes = matrix_bytes(&m->output);
    for (int l = 0; l < m->config.n_layers; l++)
        for (int i = 0; i < LAYER_MATRICES; i++) bytes += matrix_bytes(layer_matrix(m, l, i));
    return bytes;
}

static void model_free(Model *m) {
    bool flat = m->file.data != NULL; // then everything below lies in the file
    for (int l = 0; l < m->config.n_layers && !flat; l++) {
        const Layer *a = &m->layers[l];
        for (int i = 0; i < LAYER_MATRICES; i++) matrix_free(layer_matrix(m, l, i));
        const float *vectors[] = {a->attn_norm, a->ffn_norm, a->q_bias, a->k_bias,
                                  a->v_bias,    a->o_bias,   a->q_norm, a->k_norm};
        for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) free((void *)vectors[i]);
    }
    if (!flat) {
        if (!m->tied) matrix_free(&m->output);
        matrix_free(&m->embed);
        free((void *)m->final_norm);
        free((void *)m->rope_divisors);
    }
    unmap_file(&m->file);
    free(m->rope_freqs);
    free(m->layers);
    free(m);
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
// A Floats or Ints is a vector register of LANES outputs. What is done with them is written down first in plain C; an
// instruction set replaces these primitives, and nothing else: only here is code for a particular processor.

// a * b + c, rounded once. A build for x86 processors without FMA rounds twice (doc/numerics.md).
static inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#if defined(RUN_PLAIN) || \
    !(defined(__AVX2__) && defined(__FMA__) && defined(__F16C__) || defined(__ARM_FEATURE_DOTPROD))
enum { LANES = 16, TILE_PANELS = 1, TILE_ROWS = 3, FLOAT_ROWS = 6, DOT_OFFSET = 0 };
typedef struct {
    float lane[LANES];
} Floats;
typedef struct {
    int32_t lane[LANES];
} Ints;
#define EACH_LANE for (int i = 0; i < LANES; i++)
#define RETURN_LANES(type, value) \
    type result; \
    EACH_LANE result.lane[i] = value; \
    return result
static inline Floats floats_load(const float *p) {
    RETURN_LANES(Floats, p[i]);
}
static inline Floats floats_load_f16(const uint16_t *p) {
    RETURN_LANES(Floats, float_from_f16(p[i]));
}
static inline void floats_store(float *p, Floats v) {
    EACH_LANE p[i] = v.lane[i];
}
static inline void floats_store_f16(uint16_t *p, Floats v) {
    EACH_LANE p[i] = f16_from_float(v.lane[i]);
}
static inline Floats floats_set(float x) {
    RETURN_LANES(Floats, x);
}
static inline Floats floats_mul(Floats a, Floats b) {
    RETURN_LANES(Floats, a.lane[i] * b.lane[i]);
}
static inline Floats floats_fma(Floats a, Floats b, Floats c) {
    RETURN_LANES(Floats, fma1(a.lane[i], b.lane[i], c.lane[i]));
}
static inline Floats floats_from_ints(Ints v) {
    RETURN_LANES(Floats, (float)v.lane[i]);
}
static inline Floats floats_from_bits(Ints v) { // the same bits
    RETURN_LANES(Floats, float_from_bits((uint32_t)v.lane[i]));
}
static inline Ints ints_load(const void *p) {
    Ints v;
    memcpy(&v, p, sizeof v);
    return v;
}
static inline Ints ints_set(int32_t x) {
    RETURN_LANES(Ints, x);
}
// Of each 4-byte step: the lower and upper half, as f16 or bf16, to floats.
static inline Floats floats_from_f16_low(Ints v) {
    RETURN_LANES(Floats, float_from_f16((uint16_t)v.lane[i]));
}
static inline Floats floats_from_f16_high(Ints v) {
    RETURN_LANES(Floats, float_from_f16((uint16_t)((uint32_t)v.lane[i] >> 16)));
}
static inline Floats floats_from_bf16_low(Ints v) {
    RETURN_LANES(Floats, float_from_bits((uint32_t)v.lane[i] << 16));
}
static inline Floats floats_from_bf16_high(Ints v) {
    RETURN_LANES(Floats, float_from_bits((uint32_t)v.lane[i] & 0xffff0000));
}
// Of each byte: the low and high 4 bits.
static inline Ints ints_low_nibbles(Ints v) {
    RETURN_LANES(Ints, v.lane[i] & 0x0f0f0f0f);
}
static inline Ints ints_high_nibbles(Ints v) {
    RETURN_LANES(Ints, v.lane[i] >> 4 & 0x0f0f0f0f);
}
// acc += the dot product of the 4 int8 of w and the 4 of x that each lane holds.
static inline Ints ints_dot_int8(Ints acc, Ints w, Ints x) {
    const int8_t *a = (const int8_t *)&w, *b = (const int8_t *)&x;
    EACH_LANE for (int j = 0; j < 4; j++) acc.lane[i] += a[4 * i + j] * b[4 * i + j];
    return acc;
}
#define ints_dot_nibbles ints_dot_int8
#define ints_as_int8(v) (v)

#elif defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VNNI__)
#include <immintrin.h>
enum { LANES = 16, TILE_PANELS = 2, TILE_ROWS = 6, FLOAT_ROWS = 12 };
typedef __m512 Floats;
typedef __m512i Ints;
#define floats_load(p) _mm512_loadu_ps(p)
#define floats_load_f16(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define floats_store(p, v) _mm512_storeu_ps(p, v)
#define floats_store_f16(p, v) _mm256_storeu_si256((__m256i *)(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define floats_set(x) _mm512_set1_ps(x)
#define floats_mul(a, b) _mm512_mul_ps(a, b)
#define floats_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define floats_from_ints(v) _mm512_cvtepi32_ps(v)
#define floats_from_bits(v) _mm512_castsi512_ps(v)
#define ints_load(p) _mm512_loadu_si512(p)
#define ints_set(x) _mm512_set1_epi32(x)
#define floats_from_f16_low(v) _mm512_cvtph_ps(_mm512_cvtepi32_epi16(v))
#define floats_from_f16_high(v) _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(v, 16)))
#define floats_from_bf16_low(v) _mm512_castsi512_ps(_mm512_slli_epi32(v, 16))
#define floats_from_bf16_high(v) _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)))
#define ints_low_nibbles(v) _mm512_and_si512(v, _mm512_set1_epi8(15))
#define ints_high_nibbles(v) _mm512_and_si512(_mm512_srli_epi32(v, 4), _mm512_set1_epi8(15))
// vpdpbusd multiplies unsigned by signed bytes. XOR 0x80 turns an int8 w into w + 128, so that the dot product comes
// out too large by 128 * sum(x): it starts at minus that.
enum { DOT_OFFSET = 128 };
#define ints_as_int8(v) _mm512_xor_si512(v, _mm512_set1_epi8((char)0x80))
#define ints_dot_int8(acc, w, x) _mm512_dpbusd_epi32(acc, w, x)
#define ints_dot_nibbles(acc, w, x) _mm512_dpbusd_epi32(acc, w, x)
#ifdef __AVX512BF16__
#define floats_dot_bf16(acc, w, x) _mm512_dpbf16_ps(acc, (__m512bh)(w), (__m512bh)(x))
#endif

#elif defined(__AVX2__)
#include <immintrin.h>
enum { LANES = 8, TILE_PANELS = 1, TILE_ROWS = 3, FLOAT_ROWS = 6, DOT_OFFSET = 0 };
typedef __m256 Floats;
typedef __m256i Ints;
#define floats_load(p) _mm256_loadu_ps((const float *)(p))
#define floats_load_f16(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define floats_store(p, v) _mm256_storeu_ps(p, v)
#define floats_store_f16(p, v) _mm_storeu_si128((__m128i *)(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT))
#define floats_set(x) _mm256_set1_ps(x)
#define floats_mul(a, b) _mm256_mul_ps(a, b)
#define floats_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define floats_from_ints(v) _mm256_cvtepi32_ps(v)
#define floats_from_bits(v) _mm256_castsi256_ps(v)
#define ints_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define ints_set(x) _mm256_set1_epi32(x)
static inline Floats floats_from_f16_low(Ints v) { // gather the low halves of 8 words into 8 neighbouring halves
    __m256i low = _mm256_blend_epi16(v, _mm256_setzero_si256(), 0xAA);
    __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, low), 0x08);
    return _mm256_cvtph_ps(_mm256_castsi256_si128(packed));
}
#define floats_from_f16_high(v) floats_from_f16_low(_mm256_srli_epi32(v, 16))
#define floats_from_bf16_low(v) _mm256_castsi256_ps(_mm256_slli_epi32(v, 16))
#define floats_from_bf16_high(v) _mm256_castsi256_ps(_mm256_and_si256(v, _mm256_set1_epi32((int)0xffff0000)))
#define ints_low_nibbles(v) _mm256_and_si256(v, _mm256_set1_epi8(15))
#define ints_high_nibbles(v) _mm256_and_si256(_mm256_srli_epi32(v, 4), _mm256_set1_epi8(15))
#define ints_as_int8(v) (v)
// maddubs, too, wants unsigned times signed bytes, and sums pairs in 16 bits: 2 * 128 * 127 fits. int8: |w| and x with
// the sign of w.
static inline Ints ints_dot_nibbles(Ints acc, Ints w, Ints x) {
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
}
#define ints_dot_int8(acc, w, x) ints_dot_nibbles(acc, _mm256_abs_epi8(w), _mm256_sign_epi8(x, w))

#else // NEON with dot products (ARMv8.2)
#include <arm_neon.h>
enum { LANES = 4, TILE_PANELS = 1, TILE_ROWS = 3, FLOAT_ROWS = 6, DOT_OFFSET = 0 };
typedef float32x4_t Floats;
typedef int32x4_t Ints;
#define floats_load(p) vld1q_f32((const float *)(p))
#define floats_load_f16(p) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)))
#define floats_store(p, v) vst1q_f32(p, v)
#define floats_store_f16(p, v) vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v)))
#define floats_set(x) vdupq_n_f32(x)
#define floats_mul(a, b) vmulq_f32(a, b)
#define floats_fma(a, b, c) vfmaq_f32(c, a, b)
#define floats_from_ints(v) vcvtq_f32_s32(v)
#define floats_from_bits(v) vreinterpretq_f32_s32(v)
#define ints_load(p) vld1q_s32((const int32_t *)(p))
#define ints_set(x) vdupq_n_s32(x)
#define floats_from_f16_low(v) vcvt_f32_f16(vreinterpret_f16_s16(vmovn_s32(v)))
#define floats_from_f16_high(v) vcvt_f32_f16(vreinterpret_f16_s16(vshrn_n_s32(v, 16)))
#define floats_from_bf16_low(v) vreinterpretq_f32_s32(vshlq_n_s32(v, 16))
#define floats_from_bf16_high(v) vreinterpretq_f32_s32(vandq_s32(v, vdupq_n_s32((int)0xffff0000)))
#define ints_low_nibbles(v) vandq_s32(v, vdupq_n_s32(0x0f0f0f0f))
#define ints_high_nibbles(v) vandq_s32(vshrq_n_s32(v, 4), vdupq_n_s32(0x0f0f0f0f))
#define ints_as_int8(v) (v)
#define ints_dot_int8(acc, w, x) vdotq_s32(acc, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x))
#define ints_dot_nibbles ints_dot_int8
#endif

// All lanes the 4 bytes at p.
#define ints_splat(p) ints_set((int32_t)load_u32(p))
#define floats_splat(p) floats_set(float_from_bits(load_u32(p)))

enum { PANEL_VECTORS = PANEL / LANES, TILE_VECTORS = TILE_PANELS * PANEL_VECTORS, AHEAD = 96 };

// Where vector v of a tile starts, relative to the tile's first panel. `panel`: elements from one panel to the next.
static inline size_t vector_offset(int v, size_t panel) {
    return (size_t)(v / PANEL_VECTORS) * panel + (size_t)(v % PANEL_VECTORS) * LANES;
}

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define EACH_ROW UNROLL for (int r = 0; r < n_rows; r++)
#define EACH_VECTOR UNROLL for (int v = 0; v < n_panels * PANEL_VECTORS; v++)

// acc += the dot product of the 2 bf16 of w and the 2 of x that each lane holds, the higher column first: so does
// vdpbf16ps. A product of two bf16 is exact as a float; each addition rounds.
#ifndef floats_dot_bf16
#define floats_dot_bf16(acc, w, x) \
    floats_fma(floats_from_bf16_low(w), floats_from_bf16_low(x), \
               floats_fma(floats_from_bf16_high(w), floats_from_bf16_high(x), acc))
#endif

// Weights come from memory, and a processor's own prefetching ends where a page of 4 KB ends: each page would begin with
// a wait. So a tile asks for weights some steps before it needs them. Where the rows take several tiles, only the first
// would find its weights in memory; so all of them, taking turns, ask for the panels that come next.
typedef struct {
    size_t steps;    // how far ahead: AHEAD where one tile takes all rows
    int turn, tiles; // each asks for every tiles-th block, and begins one behind the tile before it
} Ahead;

static inline Ahead look_ahead(int row, int tile_rows, int n_rows, size_t steps_of_panels) {
    int tiles = (n_rows + tile_rows - 1) / tile_rows;
    return (Ahead){tiles == 1 ? AHEAD : steps_of_panels, row / tile_rows, tiles};
}

// Asks for the lines that a tile will write. Otherwise these writes wait for memory, and everything behind them.
ALWAYS_INLINE void prefetch_outputs(int n_panels, int n_rows, const float *y, size_t y_stride) {
    EACH_ROW EACH_VECTOR __builtin_prefetch(y + (size_t)r * y_stride + vector_offset(v, PANEL), 1);
}

// Float weights as a tile sees them. Attention uses it too: a cache of keys is a matrix, and so is a cache of values.
typedef struct {
    Type type;          // F32, F16, BF16
    const uint32_t *w;  // the first panel
    size_t step, panel; // 4-byte words from one step to the next, from one panel to the next
    int cols;
    ptrdiff_t ahead; // words to what one tile alone will want next
} FloatPanels;

// One tile of float weights: y[r] = W x[r] for n_rows rows and n_panels panels. These and the type are constants where
// it is inlined, so that acc is registers. x: floats, or pairs of bf16 for BF16. All strides are in 4-byte words.
ALWAYS_INLINE void tile_float(int n_panels, int n_rows, Type type, FloatPanels p, Ahead ahead, const void *x,
                              size_t x_stride, float *y, size_t y_stride) {
    Floats acc[FLOAT_ROWS][TILE_VECTORS];
    EACH_ROW EACH_VECTOR acc[r][v] = floats_set(0);
    prefetch_outputs(n_panels, n_rows, y, y_stride);
    int turn = ahead.turn;
    for (int k = 0; k < p.cols; k += step_columns(type), p.w += p.step) {
        Ints step[TILE_VECTORS];
        turn = turn ? turn - 1 : ahead.tiles - 1;
        EACH_VECTOR {
            const uint32_t *at = p.w + vector_offset(v, p.panel);
            if (turn == 0) __builtin_prefetch(ahead.tiles == 1 ? at + p.ahead : at + ahead.steps * p.step);
            step[v] = ints_load(at);
        }
        EACH_ROW {
            const char *xk = (const char *)x + 4 * ((size_t)r * x_stride + (size_t)(type == BF16 ? k / 2 : k));
            EACH_VECTOR {
                if (type == F32) acc[r][v] = floats_fma(floats_from_bits(step[v]), floats_splat(xk), acc[r][v]);
                if (type == BF16) acc[r][v] = floats_dot_bf16(acc[r][v], step[v], ints_splat(xk));
                if (type == F16) {
                    acc[r][v] = floats_fma(floats_from_f16_low(step[v]), floats_splat(xk), acc[r][v]);
                    acc[r][v] = floats_fma(floats_from_f16_high(step[v]), floats_splat(xk + 4), acc[r][v]);
                }
            }
        }
    }
    EACH_ROW EACH_VECTOR floats_store(y + (size_t)r * y_stride + vector_offset(v, PANEL), acc[r][v]);
}

// Scales or minima of one vector.
ALWAYS_INLINE Floats tile_scales(const Matrix *w, const void *array, size_t at) {
    return w->scale_type == F16 ? floats_load_f16((const uint16_t *)array + at)
                                : floats_load((const float *)array + at);
}

// One tile of quantised weights, int8 or int4. `block` columns (16 or 32) are summed in integers, then meet the scales:
// y = sum over blocks of (sum (q_w - zero) q_x) * (scale_w * scale_x) + min_w * (scale_x * sum q_x)
// Where the weights come with an offset (int4's zero, DOT_OFFSET), the integer sum starts at -offset * sum q_x.
ALWAYS_INLINE void tile_quantized(int n_panels, int n_rows, int strip, Type type, int block, const Matrix *w,
                                  size_t first_panel, Ahead ahead, const Activations *x, int row, float *y,
                                  size_t y_stride) {
    static const int32_t zeros[N_STARTS * STRIP];
    const bool has_offset = type == I8 ? DOT_OFFSET != 0 : w->zero != 0;
    const size_t panel = panel_words(w), scales_panel = panel_scales(w), x_block = strip_index(x, row, 0, BLOCK);
    const int32_t *step = (const int32_t *)w->panels + first_panel * panel, *q = x->q + strip_index(x, row, 0, 4);
    const int32_t *start = has_offset ? x->start + strip_index(x, row, 0, BLOCK / N_STARTS) : zeros;
    const float *scale_x = x->scale + x_block, *sum_x = x->sum + x_block;
    size_t scale_at = first_panel * scales_panel;
    const size_t scales_ahead = ahead.steps * (size_t)step_columns(type) / (size_t)w->group * PANEL;
    Floats acc[TILE_ROWS][TILE_VECTORS];
    EACH_ROW EACH_VECTOR acc[r][v] = floats_set(0);
    prefetch_outputs(n_panels, n_rows, y, y_stride);
    int turn = ahead.turn;
    for (int group = 0; group < w->cols; group += w->group, scale_at += PANEL) {
        for (int k = group; k < group + w->group; k += block) {
            turn = turn ? turn - 1 : ahead.tiles - 1;
            if (turn == 0) EACH_VECTOR {
                    for (int i = 0; i < block / step_columns(type); i++)
                        __builtin_prefetch(step + vector_offset(v, panel) + (ahead.steps + (size_t)i) * PANEL);
                    size_t at = (scale_at + vector_offset(v, scales_panel) + scales_ahead) * scale_bytes(w);
                    __builtin_prefetch((const char *)w->scales + at);
                    if (w->mins) __builtin_prefetch((const char *)w->mins + at);
                }
            const int which = type == I4 ? START_INT4 : block == 32 ? START_ALL : k / 16 % 2 ? START_LAST : START_FIRST;
            Ints dot[TILE_ROWS][TILE_VECTORS];
            EACH_ROW EACH_VECTOR dot[r][v] = ints_set(start[which * strip + r]);
            UNROLL for (int i = 0; i < block;
                        i += step_columns(type), step += PANEL, q += step_columns(type) / 4 * strip) {
                Ints low[TILE_VECTORS], high[TILE_VECTORS];
                EACH_VECTOR {
                    Ints words = ints_load(step + vector_offset(v, panel));
                    low[v] = type == I8 ? ints_as_int8(words) : ints_low_nibbles(words);
                    if (type == I4) high[v] = ints_high_nibbles(words);
                }
                EACH_ROW {
                    Ints first = ints_set(q[r]), second = type == I4 ? ints_set(q[strip + r]) : first;
                    EACH_VECTOR {
                        if (type == I8) dot[r][v] = ints_dot_int8(dot[r][v], low[v], first);
                        else {
                            dot[r][v] = ints_dot_nibbles(dot[r][v], low[v], first);
                            dot[r][v] = ints_dot_nibbles(dot[r][v], high[v], second);
                        }
                    }
                }
            }
            EACH_VECTOR {
                Floats scale = tile_scales(w, w->scales, scale_at + vector_offset(v, scales_panel));
                EACH_ROW {
                    Floats both = floats_mul(scale, floats_set(scale_x[r]));
                    acc[r][v] = floats_fma(floats_from_ints(dot[r][v]), both, acc[r][v]);
                }
            }
            if (w->mins) EACH_VECTOR {
                    Floats min = tile_scales(w, w->mins, scale_at + vector_offset(v, scales_panel));
                    EACH_ROW acc[r][v] = floats_fma(min, floats_set(sum_x[r]), acc[r][v]);
                }
            if ((k + block) % BLOCK == 0) { // the next block of x
                scale_x += strip;
                sum_x += strip;
                start += has_offset ? N_STARTS * strip : 0;
            }
        }
    }
    EACH_ROW EACH_VECTOR floats_store(y + (size_t)r * y_stride + vector_offset(v, PANEL), acc[r][v]);
}

// Runs call(n_panels, n_rows) with both as constants: the compiler makes one copy of the tile for each.
#define ROW_CASE(n, most, panels, call) \
    case n: \
        if (n <= most) { \
            call(panels, n); \
        } \
        break;
#define FOUR_CASES(n, most, panels, call) \
    ROW_CASE((n), most, panels, call) \
    ROW_CASE((n) + 1, most, panels, call) \
    ROW_CASE((n) + 2, most, panels, call) \
    ROW_CASE((n) + 3, most, panels, call)
#define ROW_CASES(rows, most, panels, call) \
    switch (rows) { \
        FOUR_CASES(1, most, panels, call) \
        FOUR_CASES(5, most, panels, call) \
        FOUR_CASES(9, most, panels, call) \
    }
#define WITH_CONSTANTS(panels, rows, most, call) \
    if ((panels) == TILE_PANELS) { \
        ROW_CASES(rows, most, TILE_PANELS, call) \
    } else { \
        ROW_CASES(rows, most, 1, call) \
    }

// y[r] = W x[r] for n_rows rows and n_panels panels of float weights of one type, one thread. Rows of y have room for
// whole panels.
ALWAYS_INLINE void multiply_typed(Type type, int n_panels, int n_rows, FloatPanels w, const void *x, size_t x_stride,
                                  float *y, size_t y_stride) {
    for (int p = 0; p < n_panels; p += TILE_PANELS, w.w += TILE_PANELS * w.panel)
        for (int r = 0; r < n_rows; r += FLOAT_ROWS) {
            const void *from = (const char *)x + 4 * (size_t)r * x_stride;
            float *out = y + (size_t)r * y_stride + (size_t)p * PANEL;
            Ahead ahead = look_ahead(r, FLOAT_ROWS, n_rows, w.panel / w.step * TILE_PANELS);
#define CALL(panels, rows) tile_float(panels, rows, type, w, ahead, from, x_stride, out, y_stride)
            WITH_CONSTANTS(min_int(TILE_PANELS, n_panels - p), min_int(FLOAT_ROWS, n_rows - r), FLOAT_ROWS, CALL)
#undef CALL
        }
}

static void multiply_float(int n_panels, int n_rows, FloatPanels w, const void *x, size_t x_stride, float *y,
                           size_t y_stride) {
    if (w.type == F32) multiply_typed(F32, n_panels, n_rows, w, x, x_stride, y, y_stride);
    else if (w.type == F16) multiply_typed(F16, n_panels, n_rows, w, x, x_stride, y, y_stride);
    else multiply_typed(BF16, n_panels, n_rows, w, x, x_stride, y, y_stride);
}

// The same for at most TILE_PANELS panels of quantised weights.
static void multiply_quantized(int n_panels, int n_rows, const Matrix *w, size_t first_panel, const Activations *x,
                               float *y, size_t y_stride) {
    for (int r = 0; r < n_rows; r += TILE_ROWS, y += TILE_ROWS * y_stride) {
        Ahead ahead = look_ahead(r, TILE_ROWS, n_rows, panel_words(w) / PANEL * (size_t)n_panels);
#define TILE(panels, rows, strip, type, block) \
    tile_quantized(panels, rows, strip, type, block, w, first_panel, ahead, x, r, y, y_stride)
#define CALL_IN_STRIPS(panels, rows, strip) \
    if (w->type == I4) TILE(panels, rows, strip, I4, 32); \
    else if (w->group % 32 == 0) TILE(panels, rows, strip, I8, 32); \
    else TILE(panels, rows, strip, I8, 16)
#define CALL(panels, rows) CALL_IN_STRIPS(panels, rows, STRIP)
        if (x->strip == 1) {
            CALL_IN_STRIPS(1, 1, 1);
        } else {
            WITH_CONSTANTS(n_panels, min_int(TILE_ROWS, n_rows - r), TILE_ROWS, CALL)
        }
#undef CALL
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
            if (w->type == BF16) multiply_float(n, n_rows, panels, x->pairs, x->stride / 2, out, y_stride);
            else multiply_float(n, n_rows, panels, x->f, x->stride, out, y_stride);
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §5 Layers
//
// The small functions between the matrix products, each on one row. They are written as loops over 16 lanes that a
// compiler turns into vector instructions; a sum goes through 16 partial sums and then a tree, in one fixed order.

enum { SUM_LANES = 16 };

// Sum of the lanes, pairwise: 8 + 8, 4 + 4, ...
static float sum_lanes(float lane[SUM_LANES]) {
    for (int width = SUM_LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) lane[i] += lane[i + width];
    return lane[0];
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
    float p = 1.0f / 5040;
    p = fma1(p, r, 1.0f / 720);
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

// x[i] = e^(x[i] - max), and the sum of these. Divide by it and the softmax is complete. x: [n], n a multiple of 16.
static float exp_and_sum(float *x, int n, float max) {
    float lane[SUM_LANES] = {0};
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
// longer context turns more slowly: `linear` (Chen et al. 2023) every pair by the factor, YaRN some of them; NTK-aware
// scaling raises the base so that the slowest pair turns more slowly by the factor, the fastest not at all, and those
// between in between (Peng et al. 2023, eq. 16: base * factor^(head_dim / (head_dim - 2))); or by a list of divisors in
// the file, as Llama 3 does.
static void rope_prepare(Model *m) {
    const Config *c = &m->config;
    bool ntk = c->rope_scaling == ROPE_NTK && c->head_dim > 2;
    double base = c->rope_base * (ntk ? pow(c->rope_factor, c->head_dim / (c->head_dim - 2.0)) : 1);
    m->rope_freqs = alloc((size_t)c->head_dim / 2, sizeof *m->rope_freqs, "RoPE frequencies");
    m->rope_magnitude = c->rope_scaling == ROPE_YARN ? (float)(0.1 * log(c->rope_factor) + 1) : 1;
    for (int i = 0; i < c->head_dim / 2; i++) {
        double freq = pow(base, -2.0 * i / c->head_dim), share = 0;
        if (c->rope_scaling == ROPE_LINEAR) share = 1;
        if (c->rope_scaling == ROPE_YARN) share = yarn_share(c, i);
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
    free(m->rope_freqs);
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
// (values are padded to whole panels, so that a head_dim that is no multiple of 16 takes a little more).
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
// into floats again, block of positions by block.
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

// What one thread needs to attend with.
typedef struct {
    float *q;          // [queries, head_dim]
    float *scores;     // [queries, ATTENTION_BLOCK]
    float *unpacked;   // [ATTENTION_BLOCK, head_dim padded]   a block of int8 keys, or values, as floats
    float *part, *out; // [queries, head_dim padded]
    float *max, *sum;  // [queries]
    float *rescale;    // [queries]
} Scratch;

// Neighbouring rows of one sequence, which attend together.
typedef struct {
    int first, count;
} Span;

typedef struct {
    const Model *model;
    int n_ctx, n_seqs, max_rows, max_logits, n_threads;
    int n_slots;       // positions that the cache of a sequence holds: n_ctx, or fewer in a ring
    int *lost;         // [n_seqs]   a ring has overwritten what it had of positions before this one
    int span_rows;     // rows in a span, at most
    Type kv_type;      // F32, F16 or I8
    size_t head_words; // 4-byte words of the keys and values of one kv head
    size_t v_stride;   // head_dim in whole panels; and so the widths of what matrices write:
    size_t dim_stride, q_stride, kv_stride, hidden_stride, vocab_stride;
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

// 4-byte words of one key, and of one value, in one kv head. int8: the elements, then a scale for each block of them.
static size_t key_words(const Config *c, Type type) {
    size_t hd = (size_t)c->head_dim;
    return type == I8 ? pad(hd, 4) / 4 + pad(hd, BLOCK) / BLOCK : hd / (size_t)step_columns(type);
}

static size_t value_words(const Config *c, Type type) {
    size_t hd = pad((size_t)c->head_dim, PANEL);
    return type == I8 ? hd / 4 + pad(hd, BLOCK) / BLOCK : hd / (size_t)step_columns(type);
}

// Bytes of the key and value of one position in one kv head.
static size_t cache_position_bytes(const Config *c, Type type) {
    return (key_words(c, type) + value_words(c, type)) * 4;
}

// Bytes that a token takes in the cache of all layers.
static size_t cache_token_bytes(const Config *c, Type type) {
    return cache_position_bytes(c, type) * (size_t)c->n_layers * (size_t)c->n_kv_heads;
}

// How many positions the cache of a sequence has to hold, in whole blocks where it is a ring: then the positions of a
// block lie together in it.
static int cache_slots(const Config *c, int n_ctx, int max_rows) {
    size_t all = pad((size_t)n_ctx, PANEL), ring = pad((size_t)c->sliding_window + (size_t)max_rows, ATTENTION_BLOCK);
    return (int)(c->sliding_window && ring < all ? ring : all);
}

static size_t cache_words(const Session *s) {
    const Config *c = &s->model->config;
    size_t heads = product(product((size_t)s->n_seqs, (size_t)c->n_layers, "cache"), (size_t)c->n_kv_heads, "cache");
    return product(heads, s->head_words, "key/value cache");
}

// Where the keys, and the values, of a kv head begin.
static uint32_t *cache_keys(const Session *s, int seq, int layer, int kv_head) {
    const Config *c = &s->model->config;
    size_t head = ((size_t)seq * (size_t)c->n_layers + (size_t)layer) * (size_t)c->n_kv_heads + (size_t)kv_head;
    return s->cache + head * s->head_words;
}

static uint32_t *cache_values(const Session *s, int seq, int layer, int kv_head) {
    return cache_keys(s, seq, layer, kv_head) + (size_t)s->n_slots * key_words(&s->model->config, s->kv_type);
}

// A row takes the slot of its position, and in a ring that of an older one. A sequence begins anew at position 0, and has
// lost nothing yet.
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
            memcpy(cache_keys(s, to, l, h), cache_keys(s, from, l, h), slots * key_words(c, s->kv_type) * 4);
            memcpy(cache_values(s, to, l, h), cache_values(s, from, l, h), slots * value_words(c, s->kv_type) * 4);
        }
}

// int8 keys of n positions as f32 panels. keys: the first of n / 16 panels of words of 4 int8, a panel's scales behind
// them.
static void unpack_keys(float *out, const uint32_t *keys, int n, int hd, ptrdiff_t ahead) {
    const int words = (hd + 3) / 4, blocks = (hd + BLOCK - 1) / BLOCK;
    for (int t = 0; t < n; t += PANEL, keys += (size_t)(words + blocks) * PANEL)
        for (int i = 0; i < hd; i++, out += PANEL) {
            const uint32_t *word = keys + (size_t)(i / 4) * PANEL, *scale = keys + (size_t)(words + i / BLOCK) * PANEL;
            __builtin_prefetch(word + ahead);
            for (int j = 0; j < PANEL; j++)
                out[j] = float_from_bits(scale[j]) * (float)((int32_t)(word[j] << (24 - 8 * (i % 4))) >> 24);
        }
}

// int8 values of n positions as floats. values: for each, v_stride / 4 words of 4 int8 and its scales.
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

// The keys, or the values, of n positions of a kv head from slot t (a multiple of 16) on, as matrices for §4. ahead: words
// to what will be wanted next.
static FloatPanels key_panels(const Session *s, const uint32_t *keys, int t, int n, ptrdiff_t ahead, float *unpacked) {
    const Config *c = &s->model->config;
    size_t panel = key_words(c, s->kv_type) * PANEL;
    keys += (size_t)t / PANEL * panel;
    if (s->kv_type != I8) return (FloatPanels){s->kv_type, keys, PANEL, panel, c->head_dim, ahead};
    unpack_keys(unpacked, keys, n, c->head_dim, ahead);
    return (FloatPanels){F32, (const uint32_t *)unpacked, PANEL, (size_t)c->head_dim * PANEL, c->head_dim, 0};
}

static FloatPanels value_panels(const Session *s, const uint32_t *values, int t, int n, ptrdiff_t ahead,
                                float *unpacked) {
    values += (size_t)t * value_words(&s->model->config, s->kv_type);
    if (s->kv_type != I8) return (FloatPanels){s->kv_type, values, s->v_stride, PANEL, n, ahead};
    unpack_values(unpacked, values, n, (int)s->v_stride, ahead);
    return (FloatPanels){F32, (const uint32_t *)unpacked, s->v_stride, PANEL, n, 0};
}

// out = x as halves, n of them; what is beyond the largest half, 65504, becomes that
static void f16_from_floats(uint16_t *out, const float *x, int n) {
    for (int i = 0; i < n; i += LANES) {
        float part[LANES] = {0};
        uint16_t half[LANES];
        int count = min_int(LANES, n - i);
        for (int j = 0; j < count; j++) part[j] = x[i + j] > 65504 ? 65504 : x[i + j] < -65504 ? -65504 : x[i + j];
        floats_store_f16(half, floats_load(part));
        memcpy(out + i, half, (size_t)count * sizeof *half);
    }
}

// x: [n] as int8. Word w of 4 elements goes to words[w * stride], the scale of block b to scales[b * stride].
static void store_int8(uint32_t *words, uint32_t *scales, size_t stride, const float *x, int n) {
    for (int i = 0; i < n; i += BLOCK, scales += stride) {
        float block[BLOCK] = {0}, scale, sum;
        int32_t q[BLOCK / 4], start[N_STARTS];
        memcpy(block, x + i, (size_t)min_int(BLOCK, n - i) * sizeof *x);
        quantize_block(block, 1, q, start, &scale, &sum);
        for (int j = 0; j < BLOCK / 4 && i + 4 * j < n; j++, words += stride) *words = (uint32_t)q[j];
        *scales = bits_of_float(scale);
    }
}

// Put the key and value of one kv head at a position. k, v: [head_dim]
static void cache_store(const Session *s, int layer, int kv_head, const Row *row, const float *k, const float *v) {
    enum { PART = 64 };
    const Config *c = &s->model->config;
    int hd = c->head_dim;
    size_t t = (size_t)(row->pos % s->n_slots), words = value_words(c, s->kv_type);
    uint32_t *keys = cache_keys(s, row->seq, layer, kv_head), *values = cache_values(s, row->seq, layer, kv_head);
    uint32_t *key = keys + t / PANEL * PANEL * key_words(c, s->kv_type) + t % PANEL;
    if (s->kv_type == F32) {
        for (int i = 0; i < hd; i++) key[(size_t)i * PANEL] = bits_of_float(k[i]);
        memcpy(values + t * words, v, (size_t)hd * sizeof *v);
        return;
    }
    if (s->kv_type == I8) {
        store_int8(key, key + pad((size_t)hd, 4) / 4 * PANEL, PANEL, k, hd);
        store_int8(values + t * words, values + t * words + s->v_stride / 4, 1, v, hd);
        return;
    }
    uint16_t half[PART], *value = (uint16_t *)(values + t / 2 * 2 * words) + t % 2;
    for (int i = 0; i < hd; i += PART) {
        int n = min_int(PART, hd - i);
        f16_from_floats(half, k + i, n);
        for (int j = 0; j < n; j += 2) key[(size_t)(i + j) / 2 * PANEL] = half[j] | (uint32_t)half[j + 1] << 16;
        f16_from_floats(half, v + i, n);
        for (int j = 0; j < n; j++) value[2 * (i + j)] = half[j];
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
    x.sum = alloc(blocks, sizeof *x.sum, "activations");
    x.start = alloc(blocks * N_STARTS, sizeof *x.start, "activations");
    return x;
}

static void activations_free(Activations *x) {
    void *all[] = {x->f, x->pairs, x->q, x->scale, x->sum, x->start};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
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
    s->lost = alloc((size_t)n_seqs, sizeof *s->lost, "session");
    s->head_words = product((size_t)s->n_slots, cache_position_bytes(c, kv_type), "key/value cache") / 4;
    s->dim_stride = pad((size_t)c->dim, PANEL);
    s->q_stride = pad((size_t)q_dim(c), PANEL);
    s->kv_stride = pad((size_t)kv_dim(c), PANEL);
    s->hidden_stride = pad((size_t)c->hidden_dim, PANEL);
    s->vocab_stride = pad((size_t)c->vocab_size, PANEL);
    s->v_stride = pad((size_t)c->head_dim, PANEL);
    int group = c->n_heads / c->n_kv_heads;
    s->span_rows = max_int(1, ATTENTION_QUERIES / group);
    size_t n = (size_t)max_rows;
    s->x = alloc(n * s->dim_stride, sizeof(float), "activations");
    s->q = alloc(n * s->q_stride, sizeof(float), "activations");
    s->k = alloc(n * s->kv_stride, sizeof(float), "activations");
    s->v = alloc(n * s->kv_stride, sizeof(float), "activations");
    s->branch = alloc(n * s->dim_stride, sizeof(float), "activations");
    s->gate = alloc(n * s->hidden_stride, sizeof(float), "activations");
    s->up = alloc(n * s->hidden_stride, sizeof(float), "activations");
    s->turns = alloc(n * (size_t)c->head_dim, sizeof(float), "activations");
    s->in = activations_open(m, max_rows, max_int(max_int(c->dim, c->hidden_dim), q_dim(c)));
    s->logits = alloc(product((size_t)max_logits, s->vocab_stride, "logits"), sizeof(float), "logits");
    s->wanted = alloc((size_t)max_logits, sizeof *s->wanted, "session");
    s->rows = alloc(n, sizeof *s->rows, "session");
    s->spans = alloc(n, sizeof *s->spans, "session");
    s->scratch = alloc((size_t)n_threads, sizeof *s->scratch, "session");
    for (int i = 0; i < n_threads; i++) {
        size_t queries = (size_t)(s->span_rows * group), unpacked = kv_type == I8 ? ATTENTION_BLOCK * s->v_stride : 0;
        float *f = alloc(unpacked + queries * ((size_t)c->head_dim + ATTENTION_BLOCK + 2 * s->v_stride + 3), sizeof *f,
                         "attention");
        Scratch *t = &s->scratch[i];
        t->scores = f; // first, and a multiple of 16 floats each, so that the vectors lie on cache lines
        t->unpacked = t->scores + queries * ATTENTION_BLOCK;
        t->part = t->unpacked + unpacked;
        t->out = t->part + queries * s->v_stride;
        t->q = t->out + queries * s->v_stride;
        t->max = t->q + queries * (size_t)c->head_dim;
        t->sum = t->max + queries;
        t->rescale = t->sum + queries;
    }
    s->cache = alloc_pages(cache_words(s), sizeof(uint32_t),
                           "the key/value cache (a smaller --context or --batch takes less)");
    return s;
}

static void session_free(Session *s) {
    void *all[] = {s->x,     s->q,      s->k,      s->v,    s->branch, s->gate, s->up,
                   s->turns, s->logits, s->wanted, s->rows, s->spans,  s->lost};
    activations_free(&s->in);
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    for (int i = 0; i < s->n_threads; i++) free(s->scratch[i].scores);
    free(s->scratch);
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

// Row `to` of in = rmsnorm(row `from` of x)
static void norm_row(Session *s, const float *weight, int from, int to) {
    const Config *c = &s->model->config;
    rmsnorm(s->in.f + (size_t)to * s->in.stride, s->x + (size_t)from * s->dim_stride, weight, c->dim, c->norm_eps);
    prepare_row(&s->in, to, c->dim);
}

static void norm_rows(Session *s, const float *weight, int n) {
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) norm_row(s, weight, r, r);
    meet(s);
}

// x += branch + bias, the residual connection. bias: [dim] or NULL
static void add_branch(Session *s, const float *bias, int n) {
#pragma omp for schedule(static) nowait // norm_rows gives the same rows to the same threads
    for (int r = 0; r < n; r++) {
        float *x = s->x + (size_t)r * s->dim_stride, *branch = s->branch + (size_t)r * s->dim_stride;
        for (int i = 0; bias && i < s->model->config.dim; i++) branch[i] += bias[i];
        for (size_t i = 0; i < s->dim_stride; i++) x[i] += branch[i];
    }
}

// One head's query or key: bias and norm where the model has them, then RoPE. x, bias: [head_dim]
static void finish_head(const Config *c, float *x, const float *bias, const float *norm, const float *turns) {
    for (int i = 0; bias && i < c->head_dim; i++) x[i] += bias[i];
    if (norm) rmsnorm(x, x, norm, c->head_dim, c->norm_eps);
    rope(x, turns, c->head_dim);
}

// Bias, norm and RoPE for the queries and keys of each row; keys and values into the cache.
static void rotate_and_store(Session *s, int layer, const Row *rows, int n) {
    const Config *c = &s->model->config;
    const Layer *a = &s->model->layers[layer];
    int hd = c->head_dim;
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) {
        const float *turns = s->turns + (size_t)r * (size_t)hd;
        float *q = s->q + (size_t)r * s->q_stride, *k = s->k + (size_t)r * s->kv_stride,
              *v = s->v + (size_t)r * s->kv_stride;
        for (int h = 0; h < c->n_heads; h++)
            finish_head(c, q + h * hd, a->q_bias ? a->q_bias + h * hd : NULL, a->q_norm, turns);
        for (int i = 0; a->v_bias && i < kv_dim(c); i++) v[i] += a->v_bias[i];
        for (int h = 0; h < c->n_kv_heads; h++) {
            finish_head(c, k + h * hd, a->k_bias ? a->k_bias + h * hd : NULL, a->k_norm, turns);
            cache_store(s, layer, h, &rows[r], k + h * hd, v + h * hd);
        }
    }
    meet(s);
}

// The online softmax of one query over one block of n scores (a multiple of 16), of which [from, to) are visible. Turns
// scores into weights e^(score - max); where the block raises the maximum, what was summed before shrinks by `rescale`.
// Ref: Milakov & Gimelshein 2018, alg. 3.
static void softmax_block(float *scores, int n, int from, int to, float *max, float *sum, float *rescale) {
    for (int t = 0; t < n; t++)
        if (t < from || t >= to) scores[t] = -INFINITY;
    float lane[PANEL], highest = *max; // a maximum for each lane, so that the compiler may use vectors
    for (int j = 0; j < PANEL; j++) lane[j] = -INFINITY;
    for (int t = 0; t < n; t += PANEL)
        for (int j = 0; j < PANEL; j++) lane[j] = scores[t + j] > lane[j] ? scores[t + j] : lane[j];
    for (int j = 0; j < PANEL; j++) highest = lane[j] > highest ? lane[j] : highest;
    *rescale = from < to ? exp_f32(*max - highest) : 1;
    *sum = fma1(*sum, *rescale, exp_and_sum(scores, n, from < to ? highest : 0));
    *max = highest;
}

// Task i of attention: the queries of span i / n_kv_heads that share kv head i % n_kv_heads. Its keys:
static const uint32_t *task_keys(const Session *s, int layer, const Row *rows, int task) {
    int n_kv_heads = s->model->config.n_kv_heads;
    return cache_keys(s, rows[s->spans[task / n_kv_heads].first].seq, layer, task % n_kv_heads);
}

// Words from the cache of a task to that of the next one that this thread is likely to get. While it attends, it asks for
// what lies there: short runs in many places are what memory is slow at.
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
    const Row *first = &rows[span.first];
    int kv_head = task % c->n_kv_heads, group = c->n_heads / c->n_kv_heads, n_queries = span.count * group;
    int hd = c->head_dim;
    const uint32_t *keys = task_keys(s, layer, rows, task), *values = cache_values(s, first->seq, layer, kv_head);
    ptrdiff_t next = task_distance(s, layer, rows, task);
    float scale = 1.0f / sqrtf((float)hd);
    for (int i = 0; i < n_queries; i++) { // query i: row i / group of the span, head i % group of the kv head
        const float *q =
            s->q + (size_t)(span.first + i / group) * s->q_stride + (size_t)(kv_head * group + i % group) * (size_t)hd;
        for (int j = 0; j < hd; j++) t->q[(size_t)i * (size_t)hd + (size_t)j] = q[j] * scale;
        t->max[i] = -INFINITY;
        t->sum[i] = 0;
    }
    memset(t->out, 0, (size_t)n_queries * s->v_stride * sizeof(float));
    int start = c->sliding_window ? max_int(0, first->pos - c->sliding_window + 1) : 0, end = first->pos + span.count;
    for (int b = start / ATTENTION_BLOCK * ATTENTION_BLOCK; b < end; b += ATTENTION_BLOCK) {
        int n = min_int(ATTENTION_BLOCK, end - b), padded = (int)pad((size_t)n, PANEL);
        bool last = b + ATTENTION_BLOCK >= end;
        FloatPanels k = key_panels(s, keys, b % s->n_slots, padded, last ? next : AHEAD * PANEL, t->unpacked);
        multiply_float(padded / PANEL, n_queries, k, t->q, (size_t)hd, t->scores, ATTENTION_BLOCK);
        for (int i = 0; i < n_queries; i++) {
            int pos = first->pos + i / group, oldest = c->sliding_window ? pos - c->sliding_window + 1 : 0;
            int from = max_int(oldest - b, 0), to = min_int(pos + 1 - b, n);
            softmax_block(t->scores + (size_t)i * ATTENTION_BLOCK, padded, from, to, &t->max[i], &t->sum[i],
                          &t->rescale[i]);
        }
        ptrdiff_t far = AHEAD * (ptrdiff_t)s->v_stride;
        FloatPanels v = value_panels(s, values, b % s->n_slots, n, last ? next : far, t->unpacked);
        multiply_float((int)s->v_stride / PANEL, n_queries, v, t->scores, ATTENTION_BLOCK, t->part, s->v_stride);
        for (int i = 0; i < n_queries; i++)
            for (size_t j = (size_t)i * s->v_stride; j < (size_t)(i + 1) * s->v_stride; j++)
                t->out[j] = fma1(t->out[j], t->rescale[i], t->part[j]);
    }
    for (int i = 0; i < n_queries; i++) {
        float *out = s->in.f + (size_t)(span.first + i / group) * s->in.stride +
                     (size_t)(kv_head * group + i % group) * (size_t)hd;
        for (int j = 0; j < hd; j++) out[j] = t->out[(size_t)i * s->v_stride + (size_t)j] / t->sum[i];
    }
}

// x += Wo attention(Wq norm(x), Wk norm(x), Wv norm(x))
static void attention(Session *s, int layer, const Row *rows, int n) {
    const Layer *a = &s->model->layers[layer];
    norm_rows(s, a->attn_norm, n);
    matmul(s->q, s->q_stride, &s->in, n, &a->q);
    matmul(s->k, s->kv_stride, &s->in, n, &a->k);
    matmul(s->v, s->kv_stride, &s->in, n, &a->v);
    meet(s);
    rotate_and_store(s, layer, rows, n);
#pragma omp for schedule(dynamic) nowait
    for (int i = 0; i < s->n_spans * s->model->config.n_kv_heads; i++)
        attend(s, &s->scratch[omp_get_thread_num()], layer, rows, i);
    meet(s);
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) prepare_row(&s->in, r, q_dim(&s->model->config));
    meet(s);
    matmul(s->branch, s->dim_stride, &s->in, n, &a->o);
    meet(s);
    add_branch(s, a->o_bias, n);
}

// x += Wdown (silu(Wgate norm(x)) * Wup norm(x))
static void feed_forward(Session *s, int layer, int n) {
    const Layer *a = &s->model->layers[layer];
    const Config *c = &s->model->config;
    norm_rows(s, a->ffn_norm, n);
    matmul(s->gate, s->hidden_stride, &s->in, n, &a->gate);
    matmul(s->up, s->hidden_stride, &s->in, n, &a->up);
    meet(s);
#pragma omp for schedule(static) nowait
    for (int r = 0; r < n; r++) {
        size_t at = (size_t)r * s->hidden_stride;
        swiglu(s->in.f + (size_t)r * s->in.stride, s->gate + at, s->up + at, c->hidden_dim);
        prepare_row(&s->in, r, c->hidden_dim);
    }
    meet(s);
    matmul(s->branch, s->dim_stride, &s->in, n, &a->down);
    meet(s);
    add_branch(s, NULL, n);
}

// logits = Woutput norm(x), for the rows that want them, in their order
static void classify(Session *s) {
    const Model *m = s->model;
    meet(s); // a wanted row may have been another thread's
#pragma omp for schedule(static) nowait
    for (int i = 0; i < s->n_wanted; i++) norm_row(s, m->final_norm, s->wanted[i], i);
    meet(s);
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
        Span *last = s->n_spans ? &s->spans[s->n_spans - 1] : NULL;
        bool joins = last && last->count < s->span_rows && rows[r].seq == rows[last->first].seq &&
                     rows[r].pos == rows[last->first].pos + last->count;
        if (joins) last->count++;
        else s->spans[s->n_spans++] = (Span){r, 1};
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
// §8 Packing
//
// From the weights as a file has them to panels. A loader (§9, §10) finds the rows of a matrix; matrix_load unpacks and
// rearranges them, on all threads.
//
// Each row below is a type that a GGUF file may store (its number there is the id), and the panel that holds it without
// loss. Plain types are copied. Quantised types come in blocks, drawn above their unpack functions.

typedef struct {
    const char *name;
    uint32_t id;     // in a GGUF file
    int columns;     // weights in a block
    int bytes;       // of a block
    Type type;       // of the panel
    int group;       // columns that share a scale: 16 or 32
    Type scale_type; // F16 or F32
    bool has_min;
    int zero;
} Format;

enum {
    PLAIN_F32 = 0,
    PLAIN_F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q4_K = 12,
    Q5_K,
    Q6_K,
    PLAIN_BF16 = 30
};

static const Format formats[] = {
    {"F32", PLAIN_F32, 1, 4, F32, 0, F32, false, 0},    {"F16", PLAIN_F16, 1, 2, F16, 0, F32, false, 0},
    {"BF16", PLAIN_BF16, 1, 2, BF16, 0, F32, false, 0}, {"Q8_0", Q8_0, 32, 34, I8, 32, F16, false, 0},
    {"Q4_0", Q4_0, 32, 18, I4, 32, F16, false, 8},      {"Q4_1", Q4_1, 32, 20, I4, 32, F16, true, 0},
    {"Q5_0", Q5_0, 32, 22, I8, 32, F16, false, 0},      {"Q5_1", Q5_1, 32, 24, I8, 32, F16, true, 0},
    {"Q4_K", Q4_K, 256, 144, I4, 32, F32, true, 0},     {"Q5_K", Q5_K, 256, 176, I8, 32, F32, true, 0},
    {"Q6_K", Q6_K, 256, 210, I8, 16, F32, false, 0}};

static const Format *format_by_id(uint32_t id) {
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        if (formats[i].id == id) return &formats[i];
    return NULL;
}

static uint16_t load_u16(const uint8_t *p) {
    return (uint16_t)(p[0] | p[1] << 8);
}

static float load_f16(const uint8_t *p) {
    return float_from_f16(load_u16(p));
}

// 32 neighbouring weights of a row: integers, and a scale and minimum for each half.
typedef struct {
    int8_t q[32];
    float scale[2], min[2];
} Unpacked;

// The same scale and minimum for all 32.
static void unpack_scale(Unpacked *u, float scale, float min) {
    u->scale[0] = u->scale[1] = scale;
    u->min[0] = u->min[1] = min;
}

// Q8_0, 34 bytes:  [ d f16 | 32 x int8 ]                              w = d q
static void unpack_q8_0(const uint8_t *b, Unpacked *u) {
    unpack_scale(u, load_f16(b), 0);
    memcpy(u->q, b + 2, 32);
}

// The 16 bytes n hold 32 numbers of 4 bits: byte j has number j below and number j + 16 above.
static void unpack_nibbles(const uint8_t *n, Unpacked *u) {
    for (int j = 0; j < 16; j++) {
        u->q[j] = n[j] & 15;
        u->q[j + 16] = n[j] >> 4;
    }
}

// Q4_0, 18 bytes:  [ d f16 | 16 bytes n ]                             w = d (q - 8)
// Q4_1, 20 bytes:  [ d f16 | m f16 | 16 bytes n ]                     w = d q + m
static void unpack_q4(const uint8_t *b, bool has_min, Unpacked *u) {
    unpack_scale(u, load_f16(b), has_min ? load_f16(b + 2) : 0);
    unpack_nibbles(b + (has_min ? 4 : 2), u);
}

// Q5_0, 22 bytes:  [ d f16 | high 4 bytes | 16 bytes n ]              w = d (q - 16), q = n + 16 * bit of high
// Q5_1, 24 bytes:  [ d f16 | m f16 | high 4 bytes | 16 bytes n ]      w = d q + m
static void unpack_q5(const uint8_t *b, bool has_min, Unpacked *u) {
    unpack_scale(u, load_f16(b), has_min ? load_f16(b + 2) : 0);
    const uint8_t *high = b + (has_min ? 4 : 2);
    unpack_nibbles(high + 4, u);
    for (int j = 0; j < 32; j++) u->q[j] = (int8_t)(u->q[j] + (high[j / 8] >> j % 8 & 1) * 16 - (has_min ? 0 : 16));
}

// The 12 bytes s of Q4_K and Q5_K hold 8 scales and 8 minima of 6 bits: those of parts 0..3 in the low 6 bits of bytes
// 0..3 (scales) and 4..7 (minima); of parts 4..7 the low 4 bits in bytes 8..11 and the high 2 on top of bytes 0..7.
static void unpack_k_scales(const uint8_t *s, int part, float d, float dmin, Unpacked *u) {
    int scale = part < 4 ? s[part] & 63 : (s[part + 4] & 15) | s[part - 4] >> 6 << 4;
    int min = part < 4 ? s[part + 4] & 63 : s[part + 4] >> 4 | s[part] >> 6 << 4;
    unpack_scale(u, d * (float)scale, -(dmin * (float)min));
}

// Q4_K, 144 bytes for 8 parts of 32:  [ d f16 | dmin f16 | s 12 bytes | 128 bytes n ]     w = d scale q - dmin min
// Each 32 bytes of n hold two parts, the even one in the low 4 bits.
static void unpack_q4_k(const uint8_t *b, int part, Unpacked *u) {
    unpack_k_scales(b + 4, part, load_f16(b), load_f16(b + 2), u);
    for (int j = 0; j < 32; j++) u->q[j] = b[16 + part / 2 * 32 + j] >> part % 2 * 4 & 15;
}

// Q5_K, 176 bytes:  [ d f16 | dmin f16 | s 12 bytes | 32 bytes high | 128 bytes n ]
// As Q4_K, with a fifth bit: bit `part` of high[j].
static void unpack_q5_k(const uint8_t *b, int part, Unpacked *u) {
    unpack_k_scales(b + 4, part, load_f16(b), load_f16(b + 2), u);
    for (int j = 0; j < 32; j++)
        u->q[j] = (int8_t)((b[48 + part / 2 * 32 + j] >> part % 2 * 4 & 15) | (b[16 + j] >> part & 1) << 4);
}

// Q6_K, 210 bytes:  [ 128 bytes low | 64 bytes high | 16 x int8 scale | d f16 ]     w = d scale (q - 32), groups of 16
// Of each half of 4 parts: parts 0, 1 have their low 4 bits in the low nibbles of 64 bytes, parts 2, 3 in the high
// nibbles; the 2 bits above are bits 2p and 2p + 1 of 32 bytes, p the part in its half.
static void unpack_q6_k(const uint8_t *b, int part, Unpacked *u) {
    const uint8_t *low = b + part / 4 * 64 + part % 2 * 32, *high = b + 128 + part / 4 * 32;
    float d = load_f16(b + 208);
    unpack_scale(u, 0, 0);
    for (int half = 0; half < 2; half++) u->scale[half] = d * (float)(int8_t)b[192 + 2 * part + half];
    for (int j = 0; j < 32; j++) {
        int q = (low[j] >> part % 4 / 2 * 4 & 15) | (high[j] >> part % 4 * 2 & 3) << 4;
        u->q[j] = (int8_t)(q - 32);
    }
}

// Weights 32 * i to 32 * i + 31 of a row of a quantised format.
static void unpack(const Format *f, const uint8_t *row, int i, Unpacked *u) {
    int parts = f->columns / 32, part = i % parts;
    const uint8_t *block = row + (size_t)(i / parts) * (size_t)f->bytes;
    switch (f->id) {
    case Q4_0:
    case Q4_1: unpack_q4(block, f->has_min, u); break;
    case Q5_0:
    case Q5_1: unpack_q5(block, f->has_min, u); break;
    case Q8_0: unpack_q8_0(block, u); break;
    case Q4_K: unpack_q4_k(block, part, u); break;
    case Q5_K: unpack_q5_k(block, part, u); break;
    case Q6_K: unpack_q6_k(block, part, u); break;
    default: assert(!"a format of blocks");
    }
}

// A row of any format as floats: w = scale * (q - zero) + minimum. cols is a multiple of the format's columns.
static void unpack_row(const Format *f, const uint8_t *row, int cols, float *out) {
    if (f->type == F32) memcpy(out, row, (size_t)cols * 4);
    else if (f->type == F16)
        for (int k = 0; k < cols; k++) out[k] = load_f16(row + 2 * k);
    else if (f->type == BF16)
        for (int k = 0; k < cols; k++) out[k] = float_from_bf16(load_u16(row + 2 * k));
    else
        for (int i = 0; i < cols / 32; i++) {
            Unpacked u;
            unpack(f, row, i, &u);
            for (int j = 0; j < 32; j++) out[32 * i + j] = u.scale[j / 16] * (float)(u.q[j] - f->zero) + u.min[j / 16];
        }
}

// --- into panels

// Where a loader finds a matrix: rows of a GGUF format; or llama2.c's int8 with float scales in an array of their own.
typedef struct {
    const Format *format;
    const uint8_t *weights, *scales;
    int group;       // llama2.c int8
    int turn_halves; // head_dim, where each head's rows i and i + head_dim / 2 become neighbours; else 0
} Source;

// The row of the file that becomes row r.
static int source_row(const Source *s, int r) {
    if (!s->turn_halves) return r;
    int head = r / s->turn_halves, i = r % s->turn_halves;
    return head * s->turn_halves + i / 2 + i % 2 * (s->turn_halves / 2);
}

// Steps as the file has them -> row r of a panel.
static void pack_steps(uint32_t *panel, const uint8_t *row, int r, size_t n_steps) {
    for (size_t i = 0; i < n_steps; i++) memcpy(panel + i * PANEL + (size_t)r, row + i * 4, 4);
}

static void store_scale(const Matrix *w, const void *array, size_t at, float value) {
    if (w->scale_type == F16) ((uint16_t *)array)[at] = f16_from_float(value); // it came from a half: exact
    else ((float *)array)[at] = value;
}

// A row of blocks -> row r of a panel p.
static void pack_blocks(const Matrix *w, const Format *f, const uint8_t *row, size_t p, int r) {
    uint32_t *word = (uint32_t *)w->panels + p * panel_words(w) + r;
    for (int i = 0; i < w->cols / 32; i++) {
        Unpacked u;
        unpack(f, row, i, &u);
        for (int k = 0; k < 32; k += step_columns(w->type), word += PANEL) {
            uint8_t bytes[4];
            for (int j = 0; j < 4; j++)
                bytes[j] = (uint8_t)(w->type == I8 ? u.q[k + j] : (uint8_t)u.q[k + j] | (uint8_t)u.q[k + j + 4] << 4);
            memcpy(word, bytes, 4);
        }
        for (int g = 0; g < 32 / w->group; g++) {
            size_t at = p * panel_scales(w) + (size_t)(i * (32 / w->group) + g) * PANEL + (size_t)r;
            store_scale(w, w->scales, at, u.scale[g]);
            if (w->mins) store_scale(w, w->mins, at, u.min[g]);
        }
    }
}

// llama2.c's scales of one row -> row r of panel p. scales: float [groups], at any alignment.
static void pack_scales(const Matrix *w, const uint8_t *scales, size_t p, int r) {
    for (int g = 0; g < w->cols / w->group; g++)
        memcpy((float *)w->scales + p * panel_scales(w) + (size_t)g * PANEL + (size_t)r, scales + (size_t)g * 4, 4);
}

// Row-major weights in the file -> panels, on all threads.
static Matrix matrix_load(Model *m, int rows, int cols, Source s) {
    const Format *f = s.format;
    bool int8 = s.scales != NULL, blocks = f->columns > 1;
    Matrix w = {
        int8 ? I8 : f->type, rows, cols, int8 ? s.group : f->group, int8 ? F32 : f->scale_type, f->zero, 0, 0, 0};
    size_t n = matrix_panels(&w), row_bytes = int8 ? (size_t)cols : (size_t)(cols / f->columns) * (size_t)f->bytes;
    w.panels = alloc_pages(n, panel_words(&w) * 4, "weights");
    if (is_quantized(w.type)) w.scales = alloc_pages(n, panel_scales(&w) * scale_bytes(&w), "scales");
    if (f->has_min) w.mins = alloc_pages(n, panel_scales(&w) * scale_bytes(&w), "minima");
#pragma omp parallel for schedule(static) num_threads(m->n_threads) if (n > 64) // else done before a thread wakes up
    for (size_t p = 0; p < n; p++) {
        for (int r = 0; r < min_int(PANEL, rows - (int)p * PANEL); r++) {
            size_t from = (size_t)source_row(&s, (int)p * PANEL + r);
            const uint8_t *row = s.weights + from * row_bytes;
            if (blocks) pack_blocks(&w, f, row, p, r);
            else pack_steps((uint32_t *)w.panels + p * panel_words(&w), row, r, row_bytes / 4);
            if (int8) pack_scales(&w, s.scales + from * (size_t)(cols / s.group) * 4, p, r);
        }
    }
    m->any_quantized |= is_quantized(w.type);
    m->any_bf16 |= w.type == BF16;
    return w;
}

// ---------------------------------------------------------------------------------------------------------------------
// §9 GGUF
//
// The format of the llama.cpp world, versions 2 and 3: metadata as keys and values, then tensors with names.
//
//   "GGUF", uint32 version, uint64 n_tensors, uint64 n_keys
//   n_keys times:     string key, uint32 type, value          a string is a uint64 length and bytes;
//   n_tensors times:  string name, uint32 n_dims, uint64 dims[n_dims] (columns first), uint32 format, uint64 offset
//   zeros up to a multiple of general.alignment (32 unless said); then the data, to which the offsets count
//
// An array value is a uint32 type, a uint64 length and the elements. Ref: the GGUF specification in ggml's docs.

// Refuse what no sane model has before anything is computed from it: after this, products of two of these fit a size_t
// with room to spare.
static void config_check(const Config *c, const char *path, const char *format) {
    struct {
        const char *name;
        int value, most;
    } fields[] = {{"dim", c->dim, 1 << 20},
                  {"hidden_dim", c->hidden_dim, 1 << 22},
                  {"n_layers", c->n_layers, 1 << 12},
                  {"n_heads", c->n_heads, 1 << 14},
                  {"n_kv_heads", c->n_kv_heads, 1 << 14},
                  {"head_dim", c->head_dim, 1 << 14},
                  {"vocab_size", c->vocab_size, 1 << 24},
                  {"context length", c->n_ctx_train, 1 << 30}};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++)
        if (fields[i].value < 1 || fields[i].value > fields[i].most)
            die("%s: not a sound %s: expected %s from 1 to %d, got %d", path, format, fields[i].name, fields[i].most,
                fields[i].value);
    if (c->n_heads % c->n_kv_heads)
        die("%s: not a sound %s: expected n_heads to be a multiple of n_kv_heads, got %d and %d", path, format,
            c->n_heads, c->n_kv_heads);
    if (c->head_dim % 2)
        die("%s: not a sound %s: expected an even head_dim (RoPE turns pairs), got %d", path, format, c->head_dim);
    if ((size_t)c->n_heads * (size_t)c->head_dim > 1 << 22)
        die("%s: not a sound %s: %d heads of %d are too wide", path, format, c->n_heads, c->head_dim);
    if (c->sliding_window < 0)
        die("%s: not a sound %s: expected a sliding window of at least 0, got %d", path, format, c->sliding_window);
    if (!(c->norm_eps >= 0 && c->norm_eps < 1))
        die("%s: not a sound %s: expected a norm epsilon from 0 to 1, got %g", path, format, (double)c->norm_eps);
    if (!(c->rope_base > 1 && c->rope_base < 1e12) || !(c->rope_factor >= 1e-3 && c->rope_factor <= 1e6) ||
        c->rope_n_ctx < 1 || c->rope_scaling > ROPE_YARN)
        die("%s: not a sound %s: RoPE has base %g, scaling %d, factor %g, context %d", path, format, c->rope_base,
            c->rope_scaling, c->rope_factor, c->rope_n_ctx);
}

typedef enum { G_U8, G_I8, G_U16, G_I16, G_U32, G_I32, G_F32, G_BOOL, G_STRING, G_ARRAY, G_U64, G_I64, G_F64 } GgufType;

typedef struct {
    const char *text; // not terminated
    size_t len;
} String;

typedef struct {
    String key;
    GgufType type, element; // element: of an array
    uint64_t n;             // elements of an array, else 1
    size_t pos, end;        // of the value in the file
} GgufKey;

typedef struct {
    String name;
    const Format *format;
    int rows, cols; // a vector has one row
    const uint8_t *data;
    size_t bytes;
    bool used;
} GgufTensor;

typedef struct {
    const Mapping *file;
    int version;
    int n_keys, n_tensors;
    GgufKey *keys;       // sorted by key
    GgufTensor *tensors; // sorted by name
} Gguf;

static String reader_string(Reader *r, const char *what) {
    uint64_t len = reader_u64(r, what);
    return (String){(const char *)reader_take(r, len, what), len};
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

// How much of a string a message shows, for %.*s.
static int shown(String s) {
    return s.len < 80 ? (int)s.len : 80;
}

static int compare_strings(String a, String b) {
    int order = memcmp(a.text, b.text, a.len < b.len ? a.len : b.len);
    return order ? order : (a.len > b.len) - (a.len < b.len);
}

static bool string_is(String s, const char *text) {
    return s.len == strlen(text) && !memcmp(s.text, text, s.len);
}

static int compare_keys(const void *a, const void *b) {
    return compare_strings(((const GgufKey *)a)->key, ((const GgufKey *)b)->key);
}

static int compare_tensor_names(const void *a, const void *b) {
    return compare_strings(((const GgufTensor *)a)->name, ((const GgufTensor *)b)->name);
}

static int compare_tensor_data(const void *a, const void *b) {
    const uint8_t *x = ((const GgufTensor *)a)->data, *y = ((const GgufTensor *)b)->data;
    return (x > y) - (x < y);
}

// Bytes of a value of fixed size; 0 for strings, arrays and unknown types.
static size_t gguf_type_bytes(uint32_t type) {
    static const uint8_t bytes[] = {1, 1, 2, 2, 4, 4, 4, 1, 0, 0, 8, 8, 8};
    return type < sizeof bytes ? bytes[type] : 0;
}

static void gguf_skip_value(Reader *r, String key, uint32_t type, uint64_t n) {
    if (type == G_STRING)
        for (uint64_t i = 0; i < n; i++) reader_string(r, "a string value");
    else if (!gguf_type_bytes(type))
        die("%s: key %.*s: expected a value type of GGUF, got %u", r->path, shown(key), key.text, type);
    else reader_take(r, product(n, gguf_type_bytes(type), "a GGUF value"), "a value");
}

static void gguf_read_keys(Gguf *g, Reader *r) {
    g->keys = alloc((size_t)g->n_keys, sizeof *g->keys, "GGUF keys");
    for (int i = 0; i < g->n_keys; i++) {
        GgufKey *k = &g->keys[i];
        k->key = reader_string(r, "a key");
        if (k->key.len > 65535)
            die("%s: key %d: expected a name of at most 65535 bytes, got %zu", r->path, i, k->key.len);
        uint32_t type = reader_u32(r, "type of a value");
        k->type = (GgufType)type;
        k->n = 1;
        if (type == G_ARRAY) {
            uint32_t element = reader_u32(r, "type of an array");
            k->element = (GgufType)element;
            k->n = reader_count(r, element == G_STRING ? 8 : 1, "length of an array");
            k->pos = r->pos;
            gguf_skip_value(r, k->key, element, k->n);
        } else {
            k->pos = r->pos;
            gguf_skip_value(r, k->key, type, 1);
        }
        k->end = r->pos;
    }
    qsort(g->keys, (size_t)g->n_keys, sizeof *g->keys, compare_keys);
    for (int i = 1; i < g->n_keys; i++)
        if (!compare_keys(&g->keys[i - 1], &g->keys[i]))
            die("%s: key %.*s is there twice", r->path, (int)g->keys[i].key.len, g->keys[i].key.text);
}

static const GgufKey *gguf_find(const Gguf *g, const char *key) {
    GgufKey wanted = {.key = {key, strlen(key)}};
    return g->n_keys ? bsearch(&wanted, g->keys, (size_t)g->n_keys, sizeof wanted, compare_keys) : NULL;
}

// A number of any type, or `otherwise` where the key is missing.
static double gguf_number(const Gguf *g, const char *key, double otherwise) {
    const GgufKey *k = gguf_find(g, key);
    if (!k) return otherwise;
    union {
        uint64_t u64;
        int64_t i64;
        double f64;
        float f32;
        uint32_t u32;
        int32_t i32;
        uint16_t u16;
        int16_t i16;
        uint8_t u8;
        int8_t i8;
    } v = {0};
    size_t n = gguf_type_bytes(k->type);
    memcpy(&v, g->file->data + k->pos, n);
    switch (k->type) {
    case G_U8:
    case G_BOOL: return v.u8;
    case G_I8: return v.i8;
    case G_U16: return v.u16;
    case G_I16: return v.i16;
    case G_U32: return v.u32;
    case G_I32: return v.i32;
    case G_F32: return (double)v.f32;
    case G_U64: return (double)v.u64;
    case G_I64: return (double)v.i64;
    case G_F64: return v.f64;
    default: die("%s: key %s: expected a number", g->file->path, key);
    }
}

// A whole number in the range of int; missing: `otherwise`.
static int gguf_int(const Gguf *g, const char *key, int otherwise) {
    double x = gguf_number(g, key, otherwise);
    if (!(x >= INT_MIN && x <= INT_MAX) || x != floor(x))
        die("%s: key %s: expected a whole number of 31 bits, got %g", g->file->path, key, x);
    return (int)x;
}

static String gguf_string(const Gguf *g, const char *key) {
    const GgufKey *k = gguf_find(g, key);
    if (!k) return (String){"", 0};
    if (k->type != G_STRING) die("%s: key %s: expected a string", g->file->path, key);
    Reader r = {g->file->path, g->file->data, g->file->size, k->pos};
    return reader_string(&r, key);
}

// A Reader of the elements of an array of this element type, and their number; 0 where the key is missing.
static uint64_t gguf_array(const Gguf *g, const char *key, GgufType element, Reader *r) {
    const GgufKey *k = gguf_find(g, key);
    *r = (Reader){g->file->path, g->file->data, k ? k->end : 0, k ? k->pos : 0};
    if (!k) return 0;
    if (k->type != G_ARRAY || k->element != element)
        die("%s: key %s: expected an array of type %d, got type %d of %d", g->file->path, key, element, k->type,
            k->element);
    return k->n;
}

// Name, format and shape of one tensor; its data once the offset of all data is known.
static uint64_t gguf_read_tensor(GgufTensor *t, Reader *r) {
    t->name = reader_string(r, "name of a tensor");
    if (t->name.len > 65535) die("%s: a tensor's name has %zu bytes", r->path, t->name.len);
    uint32_t n_dims = reader_u32(r, "dimensions of a tensor");
    uint64_t dims[4] = {1, 1, 1, 1};
    if (n_dims < 1 || n_dims > 4)
        die("%s: tensor %.*s: expected 1 to 4 dimensions, got %u", r->path, (int)t->name.len, t->name.text, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) dims[i] = reader_u64(r, "shape of a tensor");
    if (dims[2] != 1 || dims[3] != 1 || dims[0] < 1 || dims[0] > 1 << 24 || dims[1] < 1 || dims[1] > 1 << 24)
        die("%s: tensor %.*s: expected a vector or matrix of at most 2^24 rows and columns, got [%llu, %llu, %llu, "
            "%llu]",
            r->path, (int)t->name.len, t->name.text, (unsigned long long)dims[3], (unsigned long long)dims[2],
            (unsigned long long)dims[1], (unsigned long long)dims[0]);
    t->cols = (int)dims[0];
    t->rows = (int)dims[1];
    uint32_t id = reader_u32(r, "format of a tensor");
    t->format = format_by_id(id);
    if (!t->format)
        die("%s: tensor %.*s: its format, number %u, is none of those this program knows (F32 F16 BF16 Q8_0 Q4_0 Q4_1 "
            "Q5_0 "
            "Q5_1 Q4_K Q5_K Q6_K)",
            r->path, (int)t->name.len, t->name.text, id);
    if (t->cols % t->format->columns)
        die("%s: tensor %.*s: expected rows of whole %s blocks of %d, got rows of %d", r->path, (int)t->name.len,
            t->name.text, t->format->name, t->format->columns, t->cols);
    t->bytes = (size_t)t->rows * (size_t)(t->cols / t->format->columns) * (size_t)t->format->bytes;
    return reader_u64(r, "offset of a tensor");
}

static void gguf_read_tensors(Gguf *g, Reader *r) {
    g->tensors = alloc((size_t)g->n_tensors, sizeof *g->tensors, "tensors");
    uint64_t *offsets = alloc((size_t)g->n_tensors, sizeof *offsets, "tensors");
    for (int i = 0; i < g->n_tensors; i++) offsets[i] = gguf_read_tensor(&g->tensors[i], r);
    int alignment = gguf_int(g, "general.alignment", 32);
    if (alignment < 1 || alignment > 1 << 20 || (alignment & (alignment - 1)))
        die("%s: key general.alignment: expected a power of two, got %d", r->path, alignment);
    size_t begin = pad(r->pos, (size_t)alignment), room = begin < r->size ? r->size - begin : 0;
    for (int i = 0; i < g->n_tensors; i++) {
        GgufTensor *t = &g->tensors[i];
        if (offsets[i] % (uint64_t)alignment || offsets[i] > room || t->bytes > room - offsets[i])
            die("%s: tensor %.*s: expected %zu bytes at a multiple of %d within the %zu bytes of data, got offset "
                "%llu: "
                "the file is truncated or damaged",
                r->path, (int)t->name.len, t->name.text, t->bytes, alignment, room, (unsigned long long)offsets[i]);
        t->data = r->data + begin + offsets[i];
    }
    free(offsets);
    qsort(g->tensors, (size_t)g->n_tensors, sizeof *g->tensors, compare_tensor_data);
    for (int i = 1; i < g->n_tensors; i++) {
        const GgufTensor *a = &g->tensors[i - 1], *b = &g->tensors[i];
        if (a->data + a->bytes > b->data)
            die("%s: tensors %.*s and %.*s overlap", r->path, (int)a->name.len, a->name.text, (int)b->name.len,
                b->name.text);
    }
    qsort(g->tensors, (size_t)g->n_tensors, sizeof *g->tensors, compare_tensor_names);
    for (int i = 1; i < g->n_tensors; i++)
        if (!compare_tensor_names(&g->tensors[i - 1], &g->tensors[i]))
            die("%s: tensor %.*s is there twice", r->path, (int)g->tensors[i].name.len, g->tensors[i].name.text);
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
    *g = (Gguf){.file = file, .version = (int)version};
    g->n_tensors = (int)reader_count(&r, 24, "number of tensors");
    g->n_keys = (int)reader_count(&r, 12, "number of keys");
    gguf_read_keys(g, &r);
    gguf_read_tensors(g, &r);
    return g;
}

static void gguf_free(Gguf *g) {
    if (!g) return;
    free(g->keys);
    free(g->tensors);
    free(g);
}

// The tensor of this name, marked as used, or NULL. layer < 0: not of a layer.
static GgufTensor *gguf_tensor(Gguf *g, int layer, const char *name) {
    char full[80];
    if (layer < 0) snprintf(full, sizeof full, "%s", name);
    else snprintf(full, sizeof full, "blk.%d.%s", layer, name);
    GgufTensor wanted = {.name = {full, strlen(full)}};
    GgufTensor *t =
        g->n_tensors ? bsearch(&wanted, g->tensors, (size_t)g->n_tensors, sizeof wanted, compare_tensor_names) : NULL;
    if (t) t->used = true;
    return t;
}

// The tensor of this name and shape; `rows` 0: a vector.
static const GgufTensor *gguf_need(Gguf *g, int layer, const char *name, int rows, int cols) {
    const GgufTensor *t = gguf_tensor(g, layer, name);
    char place[32] = "";
    if (layer >= 0) snprintf(place, sizeof place, "blk.%d.", layer);
    if (!t) die("%s: tensor %s%s is missing", g->file->path, place, name);
    if (t->rows != max_int(rows, 1) || t->cols != cols)
        die("%s: tensor %s%s: expected [%d, %d], got [%d, %d]", g->file->path, place, name, max_int(rows, 1), cols,
            t->rows, t->cols);
    return t;
}

static Matrix gguf_matrix(Model *m, Gguf *g, int layer, const char *name, int rows, int cols, int turn_halves) {
    const GgufTensor *t = gguf_need(g, layer, name, rows, cols);
    Source s = {.format = t->format, .weights = t->data, .turn_halves = turn_halves};
    Matrix w;
    if (step_columns(t->format->type) == 2 && cols % 2) { // half a step: rare enough to become floats
        float *values = alloc_pages((size_t)rows * (size_t)cols, sizeof *values, name);
        for (int r = 0; r < rows; r++)
            unpack_row(t->format, t->data + (size_t)r * (size_t)cols * 2, cols, values + (size_t)r * (size_t)cols);
        s.format = format_by_id(PLAIN_F32);
        s.weights = (const uint8_t *)values;
        w = matrix_load(m, rows, cols, s);
        free_pages(values, (size_t)rows * (size_t)cols, sizeof *values);
    } else {
        w = matrix_load(m, rows, cols, s);
    }
    mapping_release(g->file, t->data, t->bytes);
    return w;
}

// A norm or bias as floats; NULL where it may be missing and is.
static float *gguf_vector(Gguf *g, int layer, const char *name, int n, int turn_halves, bool optional) {
    if (optional && !gguf_tensor(g, layer, name)) return NULL;
    const GgufTensor *t = gguf_need(g, layer, name, 0, n);
    float *file = alloc((size_t)n, sizeof *file, name), *out = alloc((size_t)n, sizeof *out, name);
    unpack_row(t->format, t->data, n, file);
    Source order = {.turn_halves = turn_halves};
    for (int i = 0; i < n; i++) out[i] = file[source_row(&order, i)];
    free(file);
    return out;
}

// `key` of the file's architecture, as "llama.context_length".
static const char *gguf_arch_key(const Gguf *g, char out[96], const char *key) {
    String arch = gguf_string(g, "general.architecture");
    snprintf(out, 96, "%.*s.%s", shown(arch), arch.text, key);
    return out;
}

static int gguf_arch_int(const Gguf *g, const char *key, int otherwise) {
    char name[96];
    return gguf_int(g, gguf_arch_key(g, name, key), otherwise);
}

static double gguf_arch_number(const Gguf *g, const char *key, double otherwise) {
    char name[96];
    return gguf_number(g, gguf_arch_key(g, name, key), otherwise);
}

static void gguf_rope(Gguf *g, Config *c) {
    char key[96];
    c->rope_base = gguf_arch_number(g, "rope.freq_base", 10000);
    c->rope_factor = gguf_arch_number(g, "rope.scaling.factor", gguf_arch_number(g, "rope.scale_linear", 1));
    c->rope_n_ctx = gguf_arch_int(g, "rope.scaling.original_context_length", c->n_ctx_train);
    String type = gguf_string(g, gguf_arch_key(g, key, "rope.scaling.type"));
    if (string_is(type, "linear") || (!type.len && c->rope_factor != 1)) c->rope_scaling = ROPE_LINEAR;
    else if (string_is(type, "yarn")) c->rope_scaling = ROPE_YARN;
    else if (string_is(type, "llama3") && !gguf_tensor(g, -1, "rope_freqs.weight"))
        die("%s: RoPE is scaled as in Llama 3, but tensor rope_freqs.weight is missing", g->file->path);
    else if (type.len && !string_is(type, "none") && !string_is(type, "llama3"))
        die("%s: key %s: expected none, linear, llama3 or yarn, got %.*s", g->file->path, key, shown(type), type.text);
    static const struct {
        const char *key;
        double usual;
    } fixed[] = {
        {"rope.scaling.attn_factor", 1},     {"rope.scaling.yarn_attn_factor", 1}, {"rope.scaling.yarn_ext_factor", 1},
        {"rope.scaling.yarn_beta_fast", 32}, {"rope.scaling.yarn_beta_slow", 1},   {"attention.scale", 0},
        {"final_logit_softcapping", 0},      {"attn_logit_softcapping", 0},        {"logit_scale", 0}};
    for (size_t i = 0; i < sizeof fixed / sizeof *fixed; i++)
        if (gguf_arch_number(g, fixed[i].key, fixed[i].usual) != fixed[i].usual)
            die("%s: key %s: only %g is supported, got %g", g->file->path, gguf_arch_key(g, key, fixed[i].key),
                fixed[i].usual, gguf_arch_number(g, fixed[i].key, 0));
    int turned = gguf_arch_int(g, "rope.dimension_count", c->head_dim);
    if (turned != c->head_dim)
        die("%s: RoPE turns %d of %d dimensions of a head; expected all", g->file->path, turned, c->head_dim);
}

// The hyperparameters, from the metadata, all but the size of the vocabulary.
static Config gguf_config(Gguf *g) {
    Config c = {.rope_factor = 1};
    String arch = gguf_string(g, "general.architecture");
    bool qwen = string_is(arch, "qwen2") || string_is(arch, "qwen3");
    if (!string_is(arch, "llama") && !qwen)
        die("%s: this GGUF file's architecture: expected llama, qwen2 or qwen3, got '%.*s'", g->file->path, shown(arch),
            arch.text);
    c.dim = gguf_arch_int(g, "embedding_length", 0);
    c.hidden_dim = gguf_arch_int(g, "feed_forward_length", 0);
    c.n_layers = gguf_arch_int(g, "block_count", 0);
    c.n_heads = gguf_arch_int(g, "attention.head_count", 0);
    c.n_kv_heads = gguf_arch_int(g, "attention.head_count_kv", c.n_heads);
    c.head_dim = gguf_arch_int(g, "attention.key_length", c.n_heads > 0 ? c.dim / c.n_heads : 0);
    c.n_ctx_train = gguf_arch_int(g, "context_length", 0);
    c.sliding_window = gguf_arch_int(g, "attention.sliding_window", 0);
    c.norm_eps = (float)gguf_arch_number(g, "attention.layer_norm_rms_epsilon", 1e-5);
    c.rope_halves = qwen;
    if (gguf_arch_int(g, "attention.value_length", c.head_dim) != c.head_dim)
        die("%s: keys and values have different widths; expected the same", g->file->path);
    if (gguf_arch_int(g, "expert_count", 0) > 0) die("%s: a mixture of experts; expected a dense model", g->file->path);
    gguf_rope(g, &c);
    return c;
}

static void gguf_layer(Model *m, Gguf *g, int l) {
    const Config *c = &m->config;
    Layer *a = &m->layers[l];
    int q = q_dim(c), kv = kv_dim(c), turn = c->rope_halves ? c->head_dim : 0;
    a->attn_norm = gguf_vector(g, l, "attn_norm.weight", c->dim, 0, false);
    a->ffn_norm = gguf_vector(g, l, "ffn_norm.weight", c->dim, 0, false);
    a->q = gguf_matrix(m, g, l, "attn_q.weight", q, c->dim, turn);
    a->k = gguf_matrix(m, g, l, "attn_k.weight", kv, c->dim, turn);
    a->v = gguf_matrix(m, g, l, "attn_v.weight", kv, c->dim, 0);
    a->o = gguf_matrix(m, g, l, "attn_output.weight", c->dim, q, 0);
    a->q_bias = gguf_vector(g, l, "attn_q.bias", q, turn, true);
    a->k_bias = gguf_vector(g, l, "attn_k.bias", kv, turn, true);
    a->v_bias = gguf_vector(g, l, "attn_v.bias", kv, 0, true);
    a->o_bias = gguf_vector(g, l, "attn_output.bias", c->dim, 0, true);
    a->q_norm = gguf_vector(g, l, "attn_q_norm.weight", c->head_dim, turn, true);
    a->k_norm = gguf_vector(g, l, "attn_k_norm.weight", c->head_dim, turn, true);
    a->gate = gguf_matrix(m, g, l, "ffn_gate.weight", c->hidden_dim, c->dim, 0);
    a->up = gguf_matrix(m, g, l, "ffn_up.weight", c->hidden_dim, c->dim, 0);
    a->down = gguf_matrix(m, g, l, "ffn_down.weight", c->dim, c->hidden_dim, 0);
}

static void gguf_load(Model *m, Gguf *g) {
    Config *c = &m->config;
    *c = gguf_config(g);
    String name = gguf_string(g, "general.name");
    snprintf(m->name, sizeof m->name, "%.*s", shown(name), name.text);
    const GgufTensor *embed = gguf_tensor(g, -1, "token_embd.weight");
    if (!embed) die("%s: tensor token_embd.weight is missing: a vocabulary without a model?", g->file->path);
    const GgufTensor *first = gguf_tensor(g, 0, "ffn_gate.weight");
    snprintf(m->format, sizeof m->format, "GGUF version %d, %s", g->version, (first ? first : embed)->format->name);
    c->vocab_size = embed->rows;
    config_check(c, g->file->path, "GGUF model");
    m->layers = alloc((size_t)c->n_layers, sizeof *m->layers, "layers");
    m->embed = gguf_matrix(m, g, -1, "token_embd.weight", c->vocab_size, c->dim, 0);
    m->tied = !gguf_tensor(g, -1, "output.weight");
    m->output = m->tied ? m->embed : gguf_matrix(m, g, -1, "output.weight", c->vocab_size, c->dim, 0);
    m->final_norm = gguf_vector(g, -1, "output_norm.weight", c->dim, 0, false);
    double start = seconds();
    for (int l = 0; l < c->n_layers; l++) {
        gguf_layer(m, g, l);
        show_progress("loading, layers", l + 1, c->n_layers, start);
    }
    m->rope_divisors = gguf_vector(g, -1, "rope_freqs.weight", c->head_dim / 2, 0, true);
    rope_prepare(m);
    for (int i = 0; i < g->n_tensors; i++) // a tensor that nobody asked for belongs to a network that is not this one
        if (!g->tensors[i].used)
            die("%s: tensor %.*s has no place in this architecture", g->file->path, (int)g->tensors[i].name.len,
                g->tensors[i].name.text);
}

// ---------------------------------------------------------------------------------------------------------------------
// §10 Checkpoints
//
// llama2.c's own files, the flat checkpoint that continues them, and how to tell what a file is. A loader reads the
// header, checks that the file is exactly as long as it implies, and hands each matrix to §8.

// --- llama2.c checkpoints, versions 0, 1 and 2
//
//   version 0   7 int32 (below); float32 tensors. A negative vocab_size says that the classifier is separate. After the
//               final norm lie two tables of RoPE values that nobody reads.
//   version 1   "ak42" (uint32), 1, 7 int32, uint8 shared_classifier, zeros to byte 256; norms first, then matrices.
//   version 2   as version 1 with 2, and an int32 group_size after shared_classifier; norms float32, then for each
//               matrix its int8 values and after them one float32 scale for every group_size values.
//
//   the 7:      dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, context length

enum { LLAMA2C_HEADER = 256 };

typedef struct {
    int version, group_size;
    bool shared_classifier;
} Llama2c;

static Config llama2c_header(Reader *r, Llama2c *h) {
    *h = (Llama2c){0};
    if (r->size >= 4 && !memcmp(r->data, "24ka", 4)) { // the uint32 "ak42", lowest byte first
        reader_i32(r, "magic");
        h->version = reader_i32(r, "version");
        if (h->version < 1 || h->version > 2)
            die("%s: expected a checkpoint of version 0, 1, 2 or 3, got version %d", r->path, h->version);
    }
    Config c = {.norm_eps = 1e-5f, .rope_base = 10000, .rope_factor = 1};
    c.dim = reader_i32(r, "dim");
    c.hidden_dim = reader_i32(r, "hidden_dim");
    c.n_layers = reader_i32(r, "n_layers");
    c.n_heads = reader_i32(r, "n_heads");
    c.n_kv_heads = reader_i32(r, "n_kv_heads");
    c.vocab_size = reader_i32(r, "vocab_size");
    c.n_ctx_train = c.rope_n_ctx = reader_i32(r, "context length");
    h->shared_classifier = c.vocab_size > 0;
    if (h->version == 0 && c.vocab_size < 0) c.vocab_size = c.vocab_size == INT_MIN ? 0 : -c.vocab_size;
    if (h->version >= 1) h->shared_classifier = *reader_take(r, 1, "shared_classifier");
    if (h->version == 2) {
        h->group_size = reader_i32(r, "group_size");
        if (h->group_size < 1) die("%s: header: expected a positive group_size, got %d", r->path, h->group_size);
    }
    if (h->version >= 1) reader_take(r, LLAMA2C_HEADER - r->pos, "header");
    c.head_dim = c.n_heads > 0 ? c.dim / c.n_heads : 0;
    config_check(&c, r->path, h->version ? "llama2.c checkpoint" : "llama2.c checkpoint, and of no other known format");
    if (c.dim % c.n_heads)
        die("%s: header: expected dim to be a multiple of n_heads, got %d and %d", r->path, c.dim, c.n_heads);
    return c;
}

// The exact size of a checkpoint, from its header alone. Nothing overflows: config_check bounds the fields.
static size_t llama2c_size(const Config *c, const Llama2c *h) {
    size_t dim = (size_t)c->dim, kv = (size_t)kv_dim(c), hidden = (size_t)c->hidden_dim, layers = (size_t)c->n_layers;
    size_t classifiers = h->shared_classifier ? 1 : 2; // with the embedding, which has the same shape
    size_t matrices[] = {dim * dim, kv * dim, kv * dim, dim * dim, hidden * dim, hidden * dim, hidden * dim};
    size_t bytes = (h->version == 0 ? 28 : LLAMA2C_HEADER) + (2 * layers + 1) * dim * 4;
    if (h->version == 0) bytes += (size_t)c->n_ctx_train * (size_t)(c->head_dim / 2) * 2 * 4;
    for (int i = 0; i < 8; i++) {
        size_t n = i < 7 ? matrices[i] : (size_t)c->vocab_size * dim, copies = i < 7 ? layers : classifiers;
        bytes += copies * (h->version == 2 ? n + n / (size_t)h->group_size * 4 : n * 4);
    }
    return bytes;
}

// The next matrix of the file. Groups of version 2 run on through the flat tensor: where they do not end with the rows,
// or are too small for a panel, the values are multiplied out and kept as floats. Right before fast.
static Matrix llama2c_matrix(Model *m, const Mapping *file, Reader *r, const Llama2c *h, int rows, int cols,
                             const char *name) {
    size_t n = (size_t)rows * (size_t)cols, start = r->pos;
    Source s = {.format = format_by_id(PLAIN_F32)};
    Matrix w;
    if (h->version < 2) {
        s.weights = reader_take(r, n * 4, name);
        w = matrix_load(m, rows, cols, s);
    } else {
        size_t group = (size_t)h->group_size;
        if (n % group)
            die("%s: tensor %s: its %zu values are not a multiple of the group size %zu", r->path, name, n, group);
        const uint8_t *q = reader_take(r, n, name), *scales = reader_take(r, n / group * 4, name);
        if ((size_t)cols % group == 0 && group % 16 == 0) {
            s = (Source){s.format, q, scales, (int)group, 0};
            w = matrix_load(m, rows, cols, s);
        } else {
            float *values = alloc_pages(n, sizeof *values, name), scale;
            for (size_t i = 0; i < n; i++) {
                memcpy(&scale, scales + i / group * 4, sizeof scale);
                values[i] = (float)(int8_t)q[i] * scale;
            }
            s.weights = (const uint8_t *)values;
            w = matrix_load(m, rows, cols, s);
            free_pages(values, n, sizeof *values);
        }
    }
    mapping_release(file, r->data + start, r->pos - start);
    return w;
}

static void llama2c_load(Model *m, const Mapping *file) {
    Reader reader = {file->path, file->data, file->size, 0}, *r = &reader;
    Llama2c h;
    const Config c = m->config = llama2c_header(r, &h);
    snprintf(m->format, sizeof m->format, "llama2.c version %d (%s)", h.version, h.version == 2 ? "int8" : "float32");
    size_t expected = llama2c_size(&c, &h);
    if (r->size != expected)
        die("%s: %s: expected %zu bytes from the header, got a file of %zu bytes", r->path, m->format, expected,
            r->size);
    m->tied = h.shared_classifier;
    m->counts_prompt = true;
    m->layers = alloc((size_t)c.n_layers, sizeof *m->layers, "layers");
    // Tensors of one kind lie together, for all layers. Each kind is one turn of a loop; the order is the file's.
#define EACH_LAYER(field, value) \
    for (int l = 0; l < c.n_layers; l++) m->layers[l].field = (value)
#define NORM(name) reader_f32_array(r, (size_t)c.dim, name)
#define MATRIX(rows, cols, name) llama2c_matrix(m, file, r, &h, rows, cols, name)
    if (h.version == 0) m->embed = MATRIX(c.vocab_size, c.dim, "token_embedding");
    EACH_LAYER(attn_norm, NORM("attention_norm"));
    if (h.version >= 1) {
        EACH_LAYER(ffn_norm, NORM("ffn_norm"));
        m->final_norm = NORM("norm");
        m->embed = MATRIX(c.vocab_size, c.dim, "token_embedding");
    }
    EACH_LAYER(q, MATRIX(q_dim(&c), c.dim, "wq"));
    EACH_LAYER(k, MATRIX(kv_dim(&c), c.dim, "wk"));
    EACH_LAYER(v, MATRIX(kv_dim(&c), c.dim, "wv"));
    EACH_LAYER(o, MATRIX(c.dim, q_dim(&c), "wo"));
    if (h.version == 0) EACH_LAYER(ffn_norm, NORM("ffn_norm"));
    EACH_LAYER(gate, MATRIX(c.hidden_dim, c.dim, "w1"));
    EACH_LAYER(down, MATRIX(c.dim, c.hidden_dim, "w2"));
    EACH_LAYER(up, MATRIX(c.hidden_dim, c.dim, "w3"));
    if (h.version == 0) {
        m->final_norm = NORM("norm");
        reader_take(r, (size_t)c.n_ctx_train * (size_t)(c.head_dim / 2) * 2 * 4, "freq_cis tables");
    }
    m->output = m->tied ? m->embed : MATRIX(c.vocab_size, c.dim, "output");
#undef EACH_LAYER
#undef NORM
#undef MATRIX
    rope_prepare(m);
}

// --- version 3, the flat checkpoint: the panels lie in the file as §4 wants them (doc/formats.md has it byte by byte)
//
//   header of 256 bytes:  magic, version, file size, tensor count, flags, two offsets, hyperparameters, name
//   table:                64 bytes for each tensor: kind, layer, type, shape, group, scale type, zero, three offsets
//   then, each on a multiple of 64: panels, scales, minima; and the tokenizer

enum { FLAT_HEADER = 256, FLAT_ALIGNMENT = 64, FLAT_TIED = 1, FLAT_TOKENIZER = 2 };

// The tensors by kind: where in Model or Layer they go, and their shape, a letter for each dimension.
static const struct {
    const char *name;
    bool in_layer, matrix, optional;
    size_t at;
    char rows, cols;
} flat_tensors[] = {
    {"embedding", false, true, false, offsetof(Model, embed), 'V', 'D'},
    {"output", false, true, true, offsetof(Model, output), 'V', 'D'},
    {"final norm", false, false, false, offsetof(Model, final_norm), '1', 'D'},
    {"attention norm", true, false, false, offsetof(Layer, attn_norm), '1', 'D'},
    {"feed-forward norm", true, false, false, offsetof(Layer, ffn_norm), '1', 'D'},
    {"q", true, true, false, offsetof(Layer, q), 'Q', 'D'},
    {"k", true, true, false, offsetof(Layer, k), 'K', 'D'},
    {"v", true, true, false, offsetof(Layer, v), 'K', 'D'},
    {"o", true, true, false, offsetof(Layer, o), 'D', 'Q'},
    {"gate", true, true, false, offsetof(Layer, gate), 'F', 'D'},
    {"up", true, true, false, offsetof(Layer, up), 'F', 'D'},
    {"down", true, true, false, offsetof(Layer, down), 'D', 'F'},
    {"q bias", true, false, true, offsetof(Layer, q_bias), '1', 'Q'},
    {"k bias", true, false, true, offsetof(Layer, k_bias), '1', 'K'},
    {"v bias", true, false, true, offsetof(Layer, v_bias), '1', 'K'},
    {"o bias", true, false, true, offsetof(Layer, o_bias), '1', 'D'},
    {"q norm", true, false, true, offsetof(Layer, q_norm), '1', 'H'},
    {"k norm", true, false, true, offsetof(Layer, k_norm), '1', 'H'},
    {"RoPE divisors", false, false, true, offsetof(Model, rope_divisors), '1', 'R'},
};
enum { N_FLAT_TENSORS = sizeof flat_tensors / sizeof *flat_tensors };

static int flat_dim(const Config *c, char letter) {
    switch (letter) {
    case 'V': return c->vocab_size;
    case 'D': return c->dim;
    case 'Q': return q_dim(c);
    case 'K': return kv_dim(c);
    case 'F': return c->hidden_dim;
    case 'H': return c->head_dim;
    case 'R': return c->head_dim / 2;
    default: return 1;
    }
}

// Where a tensor of this kind and layer goes.
static void *flat_place(Model *m, int kind, int layer) {
    return (char *)(flat_tensors[kind].in_layer ? (void *)&m->layers[layer] : (void *)m) + flat_tensors[kind].at;
}

// n bytes of the file at an offset that the file itself names.
static const void *flat_data(const Mapping *file, uint64_t offset, size_t n, const char *what) {
    if (offset % FLAT_ALIGNMENT || offset < FLAT_HEADER || offset > file->size || n > file->size - offset)
        die("%s: tensor %s: expected %zu bytes at a multiple of %d within the file of %zu bytes, got offset %llu",
            file->path, what, n, FLAT_ALIGNMENT, file->size, (unsigned long long)offset);
    return file->data + offset;
}

// One entry of the table.
static void flat_tensor(Model *m, const Mapping *file, Reader *r) {
    const Config *c = &m->config;
    int kind = reader_i32(r, "kind of a tensor"), layer = reader_i32(r, "layer of a tensor");
    if (kind < 0 || kind >= N_FLAT_TENSORS)
        die("%s: expected kinds of tensors below %d, got %d", r->path, N_FLAT_TENSORS, kind);
    const char *name = flat_tensors[kind].name;
    bool in_layer = flat_tensors[kind].in_layer;
    if (in_layer ? layer < 0 || layer >= c->n_layers : layer != -1)
        die("%s: tensor %s: there is no layer %d", r->path, name, layer);
    Matrix w = {(Type)reader_i32(r, "type"),
                reader_i32(r, "rows"),
                reader_i32(r, "cols"),
                reader_i32(r, "group"),
                F32,
                0,
                0,
                0,
                0};
    w.scale_type = (Type)reader_i32(r, "scale type");
    w.zero = reader_i32(r, "zero");
    uint64_t panels = reader_u64(r, "offset"), scales = reader_u64(r, "offset"), mins = reader_u64(r, "offset");
    reader_take(r, 8, "end of an entry");
    int rows = flat_dim(c, flat_tensors[kind].rows), cols = flat_dim(c, flat_tensors[kind].cols);
    if (w.rows != rows || w.cols != cols)
        die("%s: tensor %s of layer %d: expected [%d, %d], got [%d, %d]", r->path, name, layer, rows, cols, w.rows,
            w.cols);
    bool sound = w.type <= I4 && w.cols % step_columns(w.type) == 0 && w.scale_type <= F16;
    sound = sound && (w.zero == 0 || (w.type == I4 && w.zero == 8)) && (is_quantized(w.type) || w.group == 0);
    if (w.type == I8) sound = sound && w.group >= 16 && w.group % 16 == 0 && w.cols % w.group == 0;
    if (w.type == I4) sound = sound && w.group == 32 && w.cols % 32 == 0;
    if (w.type == I8 && mins) sound = sound && w.group % 32 == 0;
    if (!flat_tensors[kind].matrix) sound = w.type == F32;
    if (!sound)
        die("%s: tensor %s of layer %d: type %d, group %d, scale type %d and zero %d do not go together", r->path, name,
            layer, w.type, w.group, w.scale_type, w.zero);
    void *place = flat_place(m, kind, layer);
    if (flat_tensors[kind].matrix ? ((Matrix *)place)->panels != NULL : *(const float **)place != NULL)
        die("%s: tensor %s of layer %d is there twice", r->path, name, layer);
    if (!flat_tensors[kind].matrix) {
        *(const float **)place = flat_data(file, panels, (size_t)cols * sizeof(float), name);
        return;
    }
    size_t n = matrix_panels(&w);
    w.panels = flat_data(file, panels, n * panel_words(&w) * 4, name);
    if (is_quantized(w.type)) w.scales = flat_data(file, scales, n * panel_scales(&w) * scale_bytes(&w), name);
    if (is_quantized(w.type) && mins) w.mins = flat_data(file, mins, n * panel_scales(&w) * scale_bytes(&w), name);
    m->any_quantized |= is_quantized(w.type);
    m->any_bf16 |= w.type == BF16;
    *(Matrix *)place = w;
}

static void flat_config(Config *c, Reader *r) {
    int *fields[] = {&c->dim,      &c->hidden_dim, &c->n_layers,    &c->n_heads,       &c->n_kv_heads,
                     &c->head_dim, &c->vocab_size, &c->n_ctx_train, &c->sliding_window};
    for (size_t i = 0; i < sizeof fields / sizeof *fields; i++) *fields[i] = reader_i32(r, "hyperparameters");
    c->rope_scaling = (RopeScaling)reader_i32(r, "RoPE scaling");
    c->rope_n_ctx = reader_i32(r, "context before scaling");
    c->norm_eps = reader_f32(r, "norm epsilon");
    c->rope_base = reader_f64(r, "RoPE base");
    c->rope_factor = reader_f64(r, "RoPE factor");
    config_check(c, r->path, "flat checkpoint");
}

static void flat_load(Model *m, Mapping *file) {
    Reader reader = {file->path, file->data, file->size, 8}, *r = &reader;
    reader_u64(r, "file size");
    uint32_t n = reader_u32(r, "number of tensors"), flags = reader_u32(r, "flags");
    uint64_t table = reader_u64(r, "offset of the table");
    reader_u64(r, "offset of the tokenizer");
    flat_config(&m->config, r);
    memcpy(m->name, reader_take(r, sizeof m->name, "name"), sizeof m->name - 1);
    if (n > r->size / 64) die("%s: expected at most %zu tensors in this file, got %u", r->path, r->size / 64, n);
    r->pos = (size_t)((const uint8_t *)flat_data(file, table, (size_t)n * 64, "table") - file->data);
    m->tied = flags & FLAT_TIED;
    m->layers = alloc((size_t)m->config.n_layers, sizeof *m->layers, "layers");
    for (uint32_t i = 0; i < n; i++) flat_tensor(m, file, r);
    if (m->tied && !m->output.panels) m->output = m->embed;
    for (int kind = 0; kind < N_FLAT_TENSORS; kind++)
        for (int l = 0; l < (flat_tensors[kind].in_layer ? m->config.n_layers : 1); l++) {
            const void *place = flat_place(m, kind, l);
            bool there =
                flat_tensors[kind].matrix ? ((const Matrix *)place)->panels != NULL : *(float *const *)place != NULL;
            if (!there && (!flat_tensors[kind].optional || kind == 1))
                die("%s: tensor %s is missing (layer %d)", r->path, flat_tensors[kind].name, l);
        }
    snprintf(m->format, sizeof m->format, "flat checkpoint (version 3), %s", type_name(m->layers[0].q.type));
    rope_prepare(m);
    m->file = *file; // the model lives in the file, which stays mapped as long as it does
    file->data = NULL;
}

// --- any checkpoint

// An open file, recognised by its first bytes. It stays where it is allocated: the parts point to it.
typedef struct {
    Mapping file;
    Gguf *gguf; // or NULL
    bool flat;  // neither: llama2.c
} Checkpoint;

// Name the formats that people try and this program does not read, each with the way out.
static void refuse_other_formats(const Mapping *file) {
    static const struct {
        size_t offset;
        const char *magic, *name;
    } others[] = {{0, "PK\3\4", "a PyTorch or zip file; export it to a .bin first"},
                  {0, "tjgg", "an old GGML file; convert it to GGUF first"},
                  {0, "lmgg", "an old GGML file; convert it to GGUF first"},
                  {8, "{\"", "a safetensors file; export it to a .bin first"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t n = strlen(others[i].magic);
        if (file->size >= others[i].offset + n && !memcmp(file->data + others[i].offset, others[i].magic, n))
            die("%s: this is %s", file->path, others[i].name);
    }
}

static Checkpoint *checkpoint_open(const char *path) {
    Checkpoint *c = alloc(1, sizeof *c, "checkpoint");
    c->file = map_file(path);
    refuse_other_formats(&c->file);
    if (c->file.size >= 4 && !memcmp(c->file.data, "GGUF", 4)) c->gguf = gguf_open(&c->file);
    c->flat = c->file.size >= 8 && !memcmp(c->file.data, "24ka\3\0\0\0", 8);
    if (c->flat) {
        Reader r = {path, c->file.data, c->file.size, 8};
        uint64_t size = reader_u64(&r, "file size");
        if (size != r.size) die("%s: truncated: expected %llu bytes, got %zu", path, (unsigned long long)size, r.size);
    }
    return c;
}

static void checkpoint_close(Checkpoint *c) {
    gguf_free(c->gguf);
    unmap_file(&c->file);
    free(c);
}

static Model *model_load(Checkpoint *checkpoint, int n_threads) {
    Model *m = alloc(1, sizeof *m, "model");
    m->path = checkpoint->file.path;
    m->n_threads = n_threads;
    if (checkpoint->gguf) gguf_load(m, checkpoint->gguf);
    else if (checkpoint->flat) flat_load(m, &checkpoint->file);
    else llama2c_load(m, &checkpoint->file);
    return m;
}

// ---------------------------------------------------------------------------------------------------------------------
// §11 Words
//
// Text as characters: UTF-8, the classes of Unicode, and the patterns by which byte-level vocabularies (§12) cut a
// text into words before anything is merged.

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

typedef struct {
    uint32_t start;
    char class;
} Run;

enum { MAX_RUNS = 4096 };
static Run unicode_table[MAX_RUNS]; // unicode_runs unfolded by unicode_prepare; constant from then on
static int n_unicode_runs;

static void unicode_prepare(void) {
    uint32_t start = 0;
    n_unicode_runs = 0;
    for (const char *p = unicode_runs; *p && n_unicode_runs < MAX_RUNS;) {
        unicode_table[n_unicode_runs++] = (Run){start, *p++};
        start += isdigit((unsigned char)*p) ? (uint32_t)strtoul(p, (char **)&p, 10) : 1;
    }
}

static char unicode_class(uint32_t c) {
    int low = 0, high = n_unicode_runs - 1; // the last run that starts at or before c
    while (low < high) {
        int middle = (low + high + 1) / 2;
        if (unicode_table[middle].start <= c) low = middle;
        else high = middle - 1;
    }
    return unicode_table[low].class;
}

// --- the pre-tokenizers
//
// Each is a regular expression, tried at every place of the text: what it matches is a word, and so is what lies
// between two matches. Some vocabularies apply several, one after the other.

// Their patterns, each above the function that matches it.
typedef enum { NO_STAGE, GPT2, ONE_NUMBER, NUMBERS, THREE_DIGITS, PUNCTUATION, LLAMA3, QWEN2, TEKKEN } Stage;

// A text as characters. One more stands behind the last: class 0, which no pattern matches.
typedef struct {
    const char *text;
    uint32_t *code;
    char *class;
    size_t *at; // offset in bytes
    int n;
} Chars;

static Chars chars_open(const char *text, size_t n) {
    Chars c = {text, alloc(n + 1, sizeof *c.code, "text"), alloc(n + 1, 1, "text"), alloc(n + 1, sizeof *c.at, "text"),
               0};
    for (size_t i = 0; i < n; c.n++) {
        int len = utf8_scan(text + i, n - i);
        c.code[c.n] = len > 0 ? utf8_decode(text + i, len) : 0xFFFD; // a byte that is no character counts as a symbol
        c.class[c.n] = unicode_class(c.code[c.n]);
        c.at[c.n] = i;
        i += (size_t)max_int(len, 1);
    }
    c.at[c.n] = n;
    return c;
}

static void chars_free(Chars *c) {
    free(c->code);
    free(c->class);
    free(c->at);
}

static bool is_letter(char class) {
    return class == 'U' || class == 'L' || class == 'O';
}

static bool is_other(char class) { // [^\s\p{L}\p{N}]
    return class && class != 'S' && class != 'N' && !is_letter(class);
}

static bool is_newline(uint32_t code) {
    return code == '\r' || code == '\n';
}

// The end of the run of characters from i on whose class is in `classes`, before `end`.
static int run_of(const Chars *c, int i, int end, const char *classes) {
    while (i < end && strchr(classes, c->class[i])) i++;
    return i;
}

// 's|'t|'re|'ve|'m|'ll|'d at i: its end, or i. any_case: (?i: ...), where also U+017F is an s.
static int match_contraction(const Chars *c, int i, int end, bool any_case) {
    static const char *const endings[] = {"s", "t", "re", "ve", "m", "ll", "d"};
    if (c->code[i] != '\'') return i;
    for (int e = 0; e < 7; e++) {
        int len = (int)strlen(endings[e]), same = 0;
        while (same < len && i + 1 + same < end) {
            uint32_t code = c->code[i + 1 + same];
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
static int match_space(const Chars *c, int i, int end) {
    int stop = run_of(c, i, end, "S");
    return stop < end && stop - i > 1 ? stop - 1 : stop;
}

// 's|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
static int match_gpt2(const Chars *c, int i, int end) {
    int stop = match_contraction(c, i, end, false);
    if (stop > i) return stop;
    int word = i + (c->code[i] == ' ');
    if (word < end && c->class[word] != 'S') {
        const char *classes = is_letter(c->class[word]) ? "ULO" : c->class[word] == 'N' ? "N" : "MP-";
        return run_of(c, word, end, classes);
    }
    return match_space(c, i, end);
}

// [\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*
static int match_cased_word(const Chars *c, int i, int end) {
    int upper = run_of(c, i, end, "UOM"), lower = run_of(c, upper, end, "LOM");
    if (lower > upper) return lower;
    for (int last = upper; last > i; last--) // without a small letter behind: up to the last that counts as either
        if (c->class[last - 1] != 'U') return last;
    return upper;
}

// llama3:  (?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+
// qwen2:   the same with \p{N} instead of \p{N}{1,3}
// tekken:  without the first, with match_cased_word for \p{L}+, \p{N}, and [\r\n/]* for [\r\n]*
static int match_modern(const Chars *c, int i, int end, Stage stage) {
    int stop = stage == TEKKEN ? i : match_contraction(c, i, end, true);
    if (stop > i) return stop;
    bool leads = !is_letter(c->class[i]) && c->class[i] != 'N' && !is_newline(c->code[i]);
    for (int word = i + leads; word >= i; word--) {
        stop = stage == TEKKEN ? match_cased_word(c, word, end) : run_of(c, word, end, "ULO");
        // tekken: a mark counts as a small letter itself, before it counts as what stands in front of capitals
        if (stage == TEKKEN && word > i && c->class[i] == 'M' && run_of(c, word, end, "U") == stop) continue;
        if (stop > word) return stop;
    }
    if (c->class[i] == 'N') return run_of(c, i, min_int(end, i + (stage == LLAMA3 ? 3 : 1)), "N");
    int symbols = i + (c->code[i] == ' ' && i + 1 < end);
    if (is_other(c->class[symbols])) {
        stop = run_of(c, symbols, end, "MP-");
        while (stop < end && (is_newline(c->code[stop]) || (stage == TEKKEN && c->code[stop] == '/'))) stop++;
        return stop;
    }
    for (stop = run_of(c, i, end, "S"); stop > i; stop--)
        if (is_newline(c->code[stop - 1])) return stop;
    return match_space(c, i, end);
}

static bool is_ascii_digit(const Chars *c, int i) {
    return c->code[i] >= '0' && c->code[i] <= '9';
}

// Where the match of a stage's pattern at i ends; i: there is none. i < end <= c->n.
static int match_stage(Stage stage, const Chars *c, int i, int end) {
    switch (stage) {
    case GPT2: return match_gpt2(c, i, end);
    case ONE_NUMBER: return i + (c->class[i] == 'N'); // \p{N}
    case NUMBERS: return run_of(c, i, end, "N");      // \p{N}+
    case THREE_DIGITS:                                // [0-9][0-9][0-9]
        return i + 3 <= end && is_ascii_digit(c, i) && is_ascii_digit(c, i + 1) && is_ascii_digit(c, i + 2) ? i + 3 : i;
    case PUNCTUATION: // [\p{P}\$\+<=>\^~\|]+
        while (i < end &&
               (c->class[i] == 'P' || (c->code[i] && c->code[i] < 128 && strchr("$+<=>^~|", (int)c->code[i]))))
            i++;
        return i;
    default: return match_modern(c, i, end, stage);
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §12 Tokenizer
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

typedef enum {
    NORMAL_PIECE = 1,
    UNKNOWN_PIECE,
    CONTROL_PIECE,
    USER_PIECE,
    UNUSED_PIECE,
    BYTE_PIECE
} PieceType; // as in GGUF

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
    Merge *merges;        // byte-level: [merges_size], open addressing
    uint32_t merges_size; // a power of two, or 0
    int *specials;        // user-defined and control pieces, longest first
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

static uint32_t power_of_two_above(uint32_t n) {
    uint32_t size = 16;
    while (size <= n) size *= 2;
    return size;
}

static uint32_t hash_bytes(const char *bytes, size_t n) { // FNV-1a
    uint32_t h = 2166136261u;
    for (size_t i = 0; i < n; i++) h = (h ^ (uint8_t)bytes[i]) * 16777619u;
    return h;
}

// The slot of a piece in the hash, or the empty slot where it would go.
static uint32_t hash_slot(const Tokenizer *t, const char *text, size_t n) {
    uint32_t slot = hash_bytes(text, n) & (t->hash_size - 1);
    for (; t->hash[slot] >= 0; slot = (slot + 1) & (t->hash_size - 1)) {
        const Piece *p = &t->pieces[t->hash[slot]];
        if ((size_t)p->len == n && !memcmp(p->text, text, n)) break;
    }
    return slot;
}

// The id of a piece of text, or -1.
static int tokenizer_find(const Tokenizer *t, const char *text, size_t n) {
    return t->hash[hash_slot(t, text, n)];
}

// The slot of a pair of ids among the merges, or the empty slot where it would go.
static Merge *merge_slot(const Tokenizer *t, int left, int right) {
    uint32_t slot = ((uint32_t)left * 2654435761u ^ (uint32_t)right * 2246822519u) & (t->merges_size - 1);
    while (t->merges[slot].left >= 0 && (t->merges[slot].left != left || t->merges[slot].right != right))
        slot = (slot + 1) & (t->merges_size - 1);
    return &t->merges[slot];
}

static void merges_open(Tokenizer *t, uint32_t n) {
    t->merges_size = power_of_two_above(2 * n);
    t->merges = alloc(t->merges_size, sizeof *t->merges, "merges");
    for (uint32_t i = 0; i < t->merges_size; i++) t->merges[i].left = -1;
}

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

static int compare_longest_first(const void *a, const void *b) {
    const Piece *x = a, *y = b;
    return (x->len < y->len) - (x->len > y->len);
}

// Fill the tables from pieces whose types are known. Of two pieces with the same text the first counts.
static void tokenizer_index(Tokenizer *t) {
    t->hash_size = power_of_two_above(2 * (uint32_t)t->n_pieces);
    t->hash = alloc(t->hash_size, sizeof *t->hash, "vocabulary");
    t->specials = alloc((size_t)t->n_pieces, sizeof *t->specials, "vocabulary");
    memset(t->hash, -1, t->hash_size * sizeof *t->hash);
    memset(t->byte_ids, -1, sizeof t->byte_ids);
    Piece *specials = alloc((size_t)t->n_pieces, sizeof *specials, "vocabulary");
    for (int id = 0; id < t->n_pieces; id++) {
        const Piece *p = &t->pieces[id];
        if (p->type == BYTE_PIECE) {
            int byte = byte_of_piece(p->text, p->len);
            if (byte >= 0 && t->byte_ids[byte] < 0) t->byte_ids[byte] = id;
        } else if (p->type == NORMAL_PIECE && p->len > 0) {
            uint32_t slot = hash_slot(t, p->text, (size_t)p->len);
            if (t->hash[slot] < 0) t->hash[slot] = id;
        } else if ((p->type == USER_PIECE || p->type == CONTROL_PIECE) && p->len > 0) {
            specials[t->n_specials] = *p;
            specials[t->n_specials++].score = (float)id; // ids are below 2^24: exact
        }
    }
    qsort(specials, (size_t)t->n_specials, sizeof *specials, compare_longest_first);
    for (int i = 0; i < t->n_specials; i++) t->specials[i] = (int)specials[i].score;
    free(specials);
}

static void tokenizer_add_stop(Tokenizer *t, int id) {
    for (int i = 0; i < t->n_stop_ids; i++)
        if (t->stop_ids[i] == id) return;
    if (id < 0) return; // the file names none
    if (id >= t->n_pieces || t->n_stop_ids == MAX_STOP_IDS)
        die("%s: tokenizer: expected at most %d stop ids, below %d, got %d", t->path, MAX_STOP_IDS, t->n_pieces, id);
    t->stop_ids[t->n_stop_ids++] = id;
}

static void tokenizer_free(Tokenizer *t) {
    void *all[] = {t->pieces, t->text, t->hash, t->merges, t->specials, t->chat_template};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    free(t);
}

static bool tokenizer_stops(const Tokenizer *t, int id) {
    for (int i = 0; i < t->n_stop_ids; i++)
        if (t->stop_ids[i] == id) return true;
    return false;
}

// --- text to ids

// A growing list of token ids.
typedef struct {
    int *id;
    int len, cap;
} Ids;

static void ids_append(Ids *ids, int id) {
    if (ids->len == ids->cap) {
        ids->cap = ids->cap ? 2 * ids->cap : 64;
        int *grown = realloc(ids->id, (size_t)ids->cap * sizeof *grown);
        if (!grown) die("out of memory: %d token ids", ids->cap);
        ids->id = grown;
    }
    ids->id[ids->len++] = id;
}

// A stretch of the text that is, so far, one piece. The symbols of a text are a doubly linked list.
typedef struct {
    const char *text;
    int len, id, prev,
        next; // id: of the piece, or -1; prev, next: indices or -1; len 0: merged into its left neighbour
} Symbol;

// Working memory of an encoding: room for as many symbols as the text has bytes, and three times as many candidates.
typedef struct {
    Symbol *symbols;
    Ranked *heap;
    int n_heap;
} Bpe;

// If the symbol at left and its successor merge, they become a candidate.
static void bpe_consider(const Tokenizer *t, Bpe *b, int left) {
    int right = left < 0 ? -1 : b->symbols[left].next;
    if (right < 0) return;
    const Symbol *l = &b->symbols[left], *r = &b->symbols[right];
    int len = l->len + r->len;
    float score;
    if (t->merges_size) {
        const Merge *merge = l->id >= 0 && r->id >= 0 ? merge_slot(t, l->id, r->id) : NULL;
        if (!merge || merge->left < 0) return;
        score = -(float)merge->rank;
    } else {
        int id = tokenizer_find(t, l->text, (size_t)len);
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
    int whole = t->whole_words ? tokenizer_find(t, text, n) : -1, n_symbols = 0;
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

// The characters [from, to) are cut by the remaining stages, and the words encoded.
static void encode_words(const Tokenizer *t, Bpe *b, const Chars *c, int from, int to, int stage, Ids *ids) {
    if (stage == MAX_STAGES || t->stages[stage] == NO_STAGE) {
        if (from < to) bpe_encode(t, b, c->text + c->at[from], c->at[to] - c->at[from], ids);
        return;
    }
    int gap = from; // the beginning of what no match has covered
    for (int i = from; i < to;) {
        int stop = match_stage(t->stages[stage], c, i, to);
        if (stop == i) {
            i++;
            continue;
        }
        encode_words(t, b, c, gap, i, stage + 1, ids);
        encode_words(t, b, c, i, stop, stage + 1, ids);
        gap = i = stop;
    }
    if (gap < to) encode_words(t, b, c, gap, to, stage + 1, ids);
}

// Sentencepiece writes a space as U+2581. Returns the length of out.
static int unescape_spaces(const char *text, size_t n, char *out) {
    int len = 0;
    for (size_t i = 0; i < n; len++) {
        bool space = n - i >= 3 && !memcmp(text + i, "\xE2\x96\x81", 3);
        out[len] = space ? ' ' : text[i];
        i += space ? 3 : 1;
    }
    return len;
}

// Text without special pieces.
static void encode_plain(const Tokenizer *t, const char *text, size_t n, Ids *ids) {
    if (n == 0) return;
    Text prepared = {0};
    bool begins = text[0] == ' ' || (n >= 3 && !memcmp(text, "\xE2\x96\x81", 3));
    if (t->space_prefix && !(t->single_prefix && begins)) text_append(&prepared, " ", 1);
    text_append(&prepared, text, n);
    if (t->escapes_space) prepared.len = (size_t)unescape_spaces(prepared.data, prepared.len, prepared.data);
    Bpe b = {alloc(prepared.len, sizeof *b.symbols, "tokenizer"), alloc(3 * prepared.len, sizeof *b.heap, "tokenizer"),
             0};
    if (t->merges_size) {
        Chars c = chars_open(prepared.data, prepared.len);
        encode_words(t, &b, &c, 0, c.n, 0, ids);
        chars_free(&c);
    } else {
        bpe_encode(t, &b, prepared.data, prepared.len, ids);
    }
    free(b.symbols);
    free(b.heap);
    free(prepared.data);
}

// The longest special piece at the beginning of the text, or -1: user-defined ones, and control pieces if asked for.
static int special_at(const Tokenizer *t, const char *text, size_t n, bool control) {
    for (int i = 0; i < t->n_specials; i++) {
        const Piece *p = &t->pieces[t->specials[i]];
        if ((size_t)p->len <= n && p->text[0] == text[0] && !memcmp(p->text, text, (size_t)p->len) &&
            (control || p->type == USER_PIECE))
            return t->specials[i];
    }
    return -1;
}

// Append the ids of a text. Pieces that the vocabulary's makers added for users are found in it first; control pieces,
// such as <s> or <|im_start|>, only where `special` says so: otherwise they are text like any other.
static void tokenizer_encode(const Tokenizer *t, const char *text, size_t n, bool special, Ids *ids) {
    if (n > INT_MAX / 8) die("a text of %zu bytes is too long to tokenize, the most is %d", n, INT_MAX / 8);
    bool starts[256] = {false}; // bytes with which some special piece begins
    for (int i = 0; i < t->n_specials; i++) starts[(uint8_t)t->pieces[t->specials[i]].text[0]] = true;
    size_t plain = 0;
    for (size_t i = 0; i < n;) {
        int id = starts[(uint8_t)text[i]] ? special_at(t, text + i, n - i, special) : -1;
        if (id < 0) {
            i++;
            continue;
        }
        encode_plain(t, text + plain, i - plain, ids);
        ids_append(ids, id);
        plain = i += (size_t)t->pieces[id].len;
    }
    encode_plain(t, text + plain, n - plain, ids);
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
// §13 Vocabularies
//
// Where the pieces come from: llama2.c's tokenizer.bin, the metadata of a GGUF file, or a flat checkpoint.

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

// Which of the two families, and for the byte-level one its pre-tokenizer. Returns whether such vocabularies begin a
// text with BOS where nothing else says so.
static bool tokenizer_set_model(Tokenizer *t, const char *path, bool byte_level, String pre) {
    snprintf(t->model, sizeof t->model, "%s", byte_level ? "gpt2" : "llama");
    if (!byte_level) return true;
    if (!pre.len) pre = (String){"default", 7};
    snprintf(t->pre, sizeof t->pre, "%.*s", shown(pre), pre.text);
    unicode_prepare();
    for (size_t i = 0; i < sizeof pre_tokenizers / sizeof *pre_tokenizers; i++) {
        if (!string_is(pre, pre_tokenizers[i].name)) continue;
        memcpy(t->stages, pre_tokenizers[i].stages, sizeof t->stages);
        t->whole_words = pre_tokenizers[i].whole_words;
        return pre_tokenizers[i].add_bos;
    }
    die("%s: tokenizer.ggml.pre: '%.*s' is no pre-tokenizer that this program knows", path, shown(pre), pre.text);
}

static void tokenizer_check(const Tokenizer *t, const char *path) {
    if (t->bos >= t->n_pieces || t->unknown >= t->n_pieces)
        die("%s: tokenizer: expected ids below %d, got BOS %d and unknown %d", path, t->n_pieces, t->bos, t->unknown);
}

// llama2.c's tokenizer.bin: int32 longest piece, then for each id float32 score, int32 length, bytes; to the end of the
// file. Ids 0, 1, 2 are <unk>, <s>, </s>.
static void tokenizer_read_llama2c(Tokenizer *t, const Mapping *file) {
    Reader r = {file->path, file->data, file->size, 0};
    int longest = reader_i32(&r, "longest piece");
    size_t most = (r.size - r.pos) / 8, text_size = 0;
    if (most > INT_MAX / 4) die("%s: too large for a tokenizer: %zu bytes", r.path, r.size);
    t->pieces = alloc(most, sizeof *t->pieces, "vocabulary");
    t->text = alloc(r.size, 1, "vocabulary");
    for (; r.pos < r.size; t->n_pieces++) {
        float score = reader_f32(&r, "score of a piece");
        int len = reader_i32(&r, "length of a piece");
        if (len < 0 || len > longest)
            die("%s: not a tokenizer.bin: piece %d at offset %zu: expected a length of at most %d, got %d", r.path,
                t->n_pieces, r.pos - 4, longest, len);
        if (isnan(score)) die("%s: piece %d at offset %zu: its score is not a number", r.path, t->n_pieces, r.pos - 8);
        char *text = memcpy(t->text + text_size, reader_take(&r, (size_t)len, "a piece"), (size_t)len);
        text_size += (size_t)len;
        PieceType type = t->n_pieces == 0 ? UNKNOWN_PIECE : t->n_pieces <= 2 ? CONTROL_PIECE : NORMAL_PIECE;
        if (type == NORMAL_PIECE && byte_of_piece(text, len) >= 0) type = BYTE_PIECE;
        t->pieces[t->n_pieces] = (Piece){text, len, score, type};
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
    Reader tokens, scores, types;
    uint64_t n = gguf_array(g, "tokenizer.ggml.tokens", G_STRING, &tokens);
    uint64_t n_scores = gguf_array(g, "tokenizer.ggml.scores", G_F32, &scores);
    uint64_t n_types = gguf_array(g, "tokenizer.ggml.token_type", G_I32, &types);
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
        int type = n_types ? reader_i32(&types, "types of pieces") : NORMAL_PIECE;
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
    static const char *const keys[] = {"eos", "eot", "eom"};
    static const char *const names[] = {"<|eot_id|>",    "<|im_end|>",      "<|end|>",      "<|eom_id|>",
                                        "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"};
    for (int i = 0; i < 3; i++) {
        char key[64];
        snprintf(key, sizeof key, "tokenizer.ggml.%s_token_id", keys[i]);
        tokenizer_add_stop(t, gguf_int(g, key, -1));
    }
    for (int i = 0; i < t->n_specials; i++) {
        const Piece *p = &t->pieces[t->specials[i]];
        for (size_t j = 0; j < sizeof names / sizeof *names; j++)
            if (p->type == CONTROL_PIECE && string_is((String){p->text, (size_t)p->len}, names[j]))
                tokenizer_add_stop(t, t->specials[i]);
    }
}

static void tokenizer_read_gguf(Tokenizer *t, const Gguf *g) {
    String model = gguf_string(g, "tokenizer.ggml.model"), pre = gguf_string(g, "tokenizer.ggml.pre");
    bool byte_level = string_is(model, "gpt2");
    if (!byte_level && !string_is(model, "llama"))
        die("%s: tokenizer.ggml.model: expected llama or gpt2, got '%.*s'", g->file->path, shown(model), model.text);
    gguf_read_pieces(t, g, byte_level);
    tokenizer_index(t);
    bool add_bos = tokenizer_set_model(t, g->file->path, byte_level, pre);
    if (byte_level) gguf_read_merges(t, g);
    t->bos = gguf_int(g, "tokenizer.ggml.bos_token_id", byte_level ? -1 : 1);
    t->unknown = gguf_int(g, "tokenizer.ggml.unknown_token_id", byte_level ? -1 : 0);
    t->add_bos = t->bos >= 0 && gguf_int(g, "tokenizer.ggml.add_bos_token", add_bos);
    t->space_prefix = !byte_level && gguf_int(g, "tokenizer.ggml.add_space_prefix", 1);
    t->escapes_space = !byte_level;
    tokenizer_check(t, g->file->path);
    gguf_read_stops(t, g);
    String chat = gguf_string(g, "tokenizer.chat_template");
    if (chat.len > 1 << 20)
        die("%s: tokenizer.chat_template: expected at most 1 MiB, got %zu bytes", g->file->path, chat.len);
    if (chat.len) t->chat_template = memcpy(alloc(chat.len + 1, 1, "chat template"), chat.text, chat.len);
}

// --- the flat checkpoint

// Where the tokenizer of a flat checkpoint lies; 0: there is none.
static size_t flat_tokenizer_offset(const Checkpoint *file) {
    Reader r = {file->file.path, file->file.data, file->file.size, 0};
    reader_take(&r, 20, "header");
    uint32_t flags = reader_u32(&r, "flags");
    reader_u64(&r, "offset of the table");
    uint64_t offset = reader_u64(&r, "offset of the tokenizer");
    return flags & FLAT_TOKENIZER ? offset : 0;
}

static void tokenizer_read_flat(Tokenizer *t, const Checkpoint *file) {
    Reader reader = {file->file.path, file->file.data, file->file.size, 0}, *r = &reader;
    r->pos = (size_t)((const uint8_t *)flat_data(&file->file, flat_tokenizer_offset(file), 0, "tokenizer") - r->data);
    bool byte_level = reader_u32(r, "tokenizer");
    uint32_t flags = reader_u32(r, "flags");
    t->bos = reader_i32(r, "BOS");
    t->unknown = reader_i32(r, "unknown piece");
    uint32_t n = reader_u32(r, "number of pieces"), n_merges = reader_u32(r, "number of merges");
    uint32_t n_stops = reader_u32(r, "number of stop ids"), n_bytes = reader_u32(r, "bytes of pieces");
    uint32_t pre_len = reader_u32(r, "length of a name"), chat_len = reader_u32(r, "length of the chat template");
    if (n < 1 || n > r->size / 9 || n > 1 << 24 || n_merges > r->size / 8 || n_stops > MAX_STOP_IDS)
        die("%s: tokenizer: %u pieces, %u merges, %u stop ids: expected fewer", r->path, n, n_merges, n_stops);
    t->n_pieces = (int)n;
    for (uint32_t i = 0; i < n_stops; i++) tokenizer_add_stop(t, reader_i32(r, "stop ids"));
    Reader scores = *r, types = *r, lengths = *r, merges = *r;
    reader_take(r, n * 4, "scores");
    types.pos = r->pos;
    reader_take(r, n, "types");
    lengths.pos = r->pos;
    reader_take(r, n * 4, "lengths");
    merges.pos = r->pos;
    reader_take(r, (size_t)n_merges * 8, "merges");
    size_t start = r->pos;
    const uint8_t *pieces = reader_take(r, n_bytes, "pieces");
    t->text = memcpy(alloc(n_bytes, 1, "pieces"), pieces, n_bytes);
    r->size = r->pos; // the pieces must not reach beyond
    r->pos = start;
    t->pieces = alloc(n, sizeof *t->pieces, "vocabulary");
    for (uint32_t i = 0; i < n; i++) {
        float score = reader_f32(&scores, "scores");
        PieceType type = (PieceType)*reader_take(&types, 1, "types");
        uint32_t len = reader_u32(&lengths, "lengths");
        if (isnan(score)) die("%s: piece %u: its score is not a number", r->path, i);
        if (len > INT_MAX / 16) die("%s: piece %u has %u bytes", r->path, i, len);
        char *text = t->text + (reader_take(r, len, "a piece") - r->data - start);
        t->pieces[i] = (Piece){text, (int)len, score, type};
    }
    r->pos = start + n_bytes;
    r->size = file->file.size;
    tokenizer_index(t);
    String pre = {(const char *)reader_take(r, pre_len, "pre-tokenizer"), pre_len};
    tokenizer_set_model(t, r->path, byte_level, pre);
    if (byte_level) {
        merges_open(t, n_merges);
        for (int rank = 0; rank < (int)n_merges; rank++) {
            int left = reader_i32(&merges, "merges"), right = reader_i32(&merges, "merges");
            merges_add(t, left, right, rank);
        }
    }
    if (chat_len)
        t->chat_template =
            memcpy(alloc(chat_len + 1, 1, "chat template"), reader_take(r, chat_len, "chat template"), chat_len);
    t->add_bos = t->bos >= 0 && flags & 1;
    t->space_prefix = flags & 2;
    t->escapes_space = flags & 4;
    t->single_prefix = flags & 8;
    tokenizer_check(t, r->path);
}

// Whether a checkpoint brings its tokenizer.
static bool has_tokenizer(const Checkpoint *file) {
    if (file->gguf) return gguf_find(file->gguf, "tokenizer.ggml.tokens") != NULL;
    return file->flat && flat_tokenizer_offset(file);
}

// The tokenizer of a GGUF file or flat checkpoint, or a llama2.c tokenizer.bin.
static Tokenizer *tokenizer_load(const Checkpoint *file) {
    Tokenizer *t = alloc(1, sizeof *t, "tokenizer");
    t->path = file->file.path;
    if (file->gguf) tokenizer_read_gguf(t, file->gguf);
    else if (file->flat && !has_tokenizer(file))
        die("%s: this checkpoint has no tokenizer (--tokenizer FILE)", t->path);
    else if (file->flat) tokenizer_read_flat(t, file);
    else tokenizer_read_llama2c(t, &file->file);
    return t;
}

// ---------------------------------------------------------------------------------------------------------------------
// §14 Sampler
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
    float temperature, top_p, min_p, repeat_penalty;
    int top_k; // 0: all
} Sampling;

enum { STRETCH = 64 }; // a multiple of SUM_LANES

typedef struct {
    Sampling sampling;
    uint64_t rng;
    int n;              // vocabulary size
    float *p;           // [n padded to STRETCH] logits, then probabilities
    Ranked *candidates; // [n]
    Ranked *spare;      // [n]
    bool *seen;         // [n]
    int n_nucleus;      // the last token was drawn from the first so many candidates, or from all of p where this is 0
    float mass;         // their probabilities add up to this
} Sampler;

// The generator is llama2.c's xorshift*, so that a seed means there what it means here. State 0 would stay 0 for ever.
static uint64_t rng_seed(uint64_t seed) {
    return seed ? seed : 0x9E3779B97F4A7C15u;
}

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

// The first of the largest. (A maximum for each of 16 lanes, so that the compiler may use vectors.)
static int argmax(const float *x, int n) {
    float lane[SUM_LANES], highest = -INFINITY;
    int i = 0;
    for (int j = 0; j < SUM_LANES; j++) lane[j] = -INFINITY;
    for (; i + SUM_LANES <= n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int j = 0; i + j < n; j++) lane[j] = x[i + j] > lane[j] ? x[i + j] : lane[j];
    for (int j = 0; j < SUM_LANES; j++) highest = lane[j] > highest ? lane[j] : highest;
    for (i = 0; i < n; i++)
        if (x[i] == highest) return i;
    return 0;
}

static void apply_penalty(Sampler *s, const int *history, int n_history) {
    float penalty = s->sampling.repeat_penalty;
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
    heap_build(s->candidates, n);
    for (int i = 0; i < s->n; i++) s->p[i] = -INFINITY;
    for (; k > 0; k--) {
        Ranked best = heap_pop(s->candidates, &n);
        s->p[best.index] = best.score;
    }
}

static void softmax(float *x, int n, float max) {
    int padded = (int)pad((size_t)n, SUM_LANES);
    for (int i = n; i < padded; i++) x[i] = -INFINITY;
    float sum = exp_and_sum(x, padded, max);
    for (int i = 0; i < n; i++) x[i] /= sum;
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

// The sum of the probabilities from `least` on. p: [n padded to 16 with zeros]
static float mass_from(const float *p, int n, float least) {
    float lane[SUM_LANES] = {0};
    for (int i = 0; i < n; i += SUM_LANES)
        for (int j = 0; j < SUM_LANES; j++) lane[j] += p[i + j] >= least ? p[i + j] : 0;
    return sum_lanes(lane);
}

// A probability below which no token can be part of the nucleus: the highest of some that has mass enough above it (by
// more than a sum is rounded).
static float nucleus_floor(const Sampler *s, float top_p) {
    for (float least = 1e-2f; least > 1e-6f; least *= 0.1f)
        if (mass_from(s->p, s->n, least) > top_p + 1e-3f) return least;
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

// Sort candidates by falling probability, equals by rising id, in the same time whether the probabilities are steep or flat:
// a radix sort. Positive floats compare like their bits; 8 bits at a time, from the lowest, keep the order of before.
// spare: [n]
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

// A draw from the nucleus, the fewest of the best candidates whose probabilities add up to more than top_p: the coin walks
// them in falling order.
static int draw_from_nucleus(Sampler *s, float smallest, float coin) {
    float top_p = s->sampling.top_p > 0 && s->sampling.top_p < 1 ? s->sampling.top_p : 1, cdf = 0;
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

// log sum e^logits: with it, log softmax(logits)[i] = logits[i] - that. logits: [n padded to 16], and is overwritten.
static double log_sum_exp(float *logits, int n) {
    float max = logits[argmax(logits, n)];
    int padded = (int)pad((size_t)n, SUM_LANES);
    for (int i = n; i < padded; i++) logits[i] = -INFINITY;
    return (double)max + log((double)exp_and_sum(logits, padded, max));
}

// The next token. logits: [n]; history: the ids so far, for the penalty. Returns -1 where the logits hold a NaN or no
// finite maximum: a broken model. One random number is drawn for each token, none at temperature 0.
static int sampler_pick(Sampler *s, const float *logits, const int *history, int n_history) {
    const Sampling *how = &s->sampling;
    bool broken = false;
    for (int i = 0; i < s->n; i++) {
        s->p[i] = logits[i];
        broken |= logits[i] != logits[i];
    }
    if (broken) return -1;
    apply_penalty(s, history, n_history);
    int best = argmax(s->p, s->n);
    if (!isfinite(s->p[best])) return -1;
    if (how->temperature == 0) return draw_from_one(s, best);
    float coin = rng_float(&s->rng);
    for (int i = 0; i < s->n && how->temperature != 1; i++) s->p[i] /= how->temperature;
    if (!isfinite(s->p[best]))
        return draw_from_one(s, best); // a temperature so low that it overflows: its limit is the best token
    apply_top_k(s);
    softmax(s->p, s->n, s->p[best]); // nothing so far has changed which token is best
    bool cut = (how->top_k > 0 && how->top_k < s->n) || how->min_p > 0 || (how->top_p > 0 && how->top_p < 1);
    if (cut) return draw_from_nucleus(s, how->min_p * s->p[best], coin);
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
// §15 Chat templates
//
// A chat model was trained on conversations in one written form, its template: marks around each message that say whose
// turn it is. Here messages go straight to ids. Marks are special pieces, put in by their ids; what a person wrote is
// ordinary text, and never searched for marks (nobody may end their turn and go on as somebody else).
//
//     ChatML     <|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n
//     Llama 3    <|start_header_id|>user<|end_header_id|>\n\nHello<|eot_id|>
//     Llama 2    [INST] Hello [/INST] Hi </s>
//
// A file carries its template as a program in jinja2. That is a language of its own; we recognise the template by the
// marks in its text, and render it ourselves.

typedef enum { SYSTEM, USER, ASSISTANT } Role;

static const char *role_name(Role role) {
    static const char *const names[] = {"system", "user", "assistant"};
    return names[role];
}

typedef struct {
    Role role;
    char *text;
    size_t len;
} Message;

typedef enum { PLAIN_TEXT, LLAMA_2, LLAMA_3, CHATML, MISTRAL, ZEPHYR, N_TEMPLATES } TemplateKind;

static const char *const template_names[N_TEMPLATES] = {"plain", "llama-2", "llama-3", "chatml", "mistral", "zephyr"};

typedef struct {
    TemplateKind kind;
    const char *system;  // ChatML: what the system says where nobody says otherwise; not terminated
    size_t system_len;   // 0: nothing
    bool dated;          // Llama 3.1 and later: the system prompt has two dates
    bool thinks, silent; // Qwen 3: answers may begin with <think>; it is asked not to
} Template;

// ChatML: the default system prompt, a literal in the template between the mark of a system message and that of its end.
static void template_find_system(Template *t, const char *source) {
    static const char begin[] = "<|im_start|>system", end[] = "<|im_end|>";
    for (const char *at = source; (at = strstr(at, begin)) != NULL;) {
        at += sizeof begin - 1;
        const char *text = !strncmp(at, "\\n", 2) ? at + 2 : *at == '\n' ? at + 1 : NULL;
        const char *stop = text ? strstr(text, end) : NULL;
        if (!stop || strcspn(text, "'\"{}") < (size_t)(stop - text)) continue;
        t->system = text;
        t->system_len = (size_t)(stop - text);
        return;
    }
}

static TemplateKind template_by_name(const char *name) {
    for (int kind = 0; kind < N_TEMPLATES; kind++)
        if (!strcmp(name, template_names[kind])) return (TemplateKind)kind;
    die_usage("--template: expected plain, llama-2, llama-3, chatml, mistral or zephyr, got '%s'", name);
}

// The template of --template NAME, else the one in the file. `source`: the file's jinja2 text, or NULL.
static Template template_choose(const char *name, const char *source, const char *path) {
    Template t = {0};
    const char *s = source ? source : "";
    bool has_inst = strstr(s, "[INST]") != NULL;
    if (strstr(s, "<|start_header_id|>")) t.kind = LLAMA_3;
    else if (strstr(s, "<|im_start|>") && !strstr(s, "reasoning_mode")) t.kind = CHATML;
    else if (has_inst && strstr(s, "<<SYS>>")) t.kind = LLAMA_2;
    else if (has_inst) t.kind = MISTRAL;
    else if (strstr(s, "<|user|>") && strstr(s, "eos_token") && !strstr(s, "<|end|>")) t.kind = ZEPHYR;
    else if (!name && source)
        die("%s: unknown chat template: choose one with --template NAME (run -h lists them)", path);
    else if (!name) fprintf(stderr, "run: note: %s has no chat template: it goes on with the text as it is\n", path);
    if (name) {
        TemplateKind kind = template_by_name(name);
        if (kind != t.kind) s = ""; // what the file says is about another one
        t.kind = kind;
    }
    t.dated = strstr(s, "Cutting Knowledge Date") != NULL;
    t.thinks = strstr(s, "enable_thinking") != NULL;
    if (t.kind == CHATML) template_find_system(&t, s);
    return t;
}

// Ids in the making. Text waits in `pending` until a mark comes, because neighbouring texts are encoded as one.
typedef struct {
    const Tokenizer *tokenizer;
    Text pending;
    Ids ids;
} Prompt;

static void prompt_flush(Prompt *p) {
    tokenizer_encode(p->tokenizer, p->pending.data, p->pending.len, false, &p->ids);
    p->pending.len = 0;
}

static void prompt_id(Prompt *p, int id) {
    prompt_flush(p);
    if (id >= 0) ids_append(&p->ids, id);
}

static void prompt_string(Prompt *p, const char *s) {
    text_append(&p->pending, s, strlen(s));
}

// The id of a special piece, or -1.
static int special_id(const Tokenizer *t, const char *name) {
    for (int i = 0; i < t->n_specials; i++) {
        const Piece *piece = &t->pieces[t->specials[i]];
        if ((size_t)piece->len == strlen(name) && !memcmp(piece->text, name, strlen(name))) return t->specials[i];
    }
    return -1;
}

// A mark: its id, or its letters where the vocabulary has no such piece.
static void prompt_mark(Prompt *p, const char *name) {
    int id = special_id(p->tokenizer, name);
    if (id >= 0) prompt_id(p, id);
    else prompt_string(p, name);
}

static Message message_trimmed(Message m) {
    while (m.len > 0 && isspace((unsigned char)m.text[m.len - 1])) m.len--;
    while (m.len > 0 && isspace((unsigned char)*m.text)) m.text++, m.len--;
    return m;
}

static void prompt_message(Prompt *p, Message m) {
    text_append(&p->pending, m.text, m.len);
}

// </s>, which ends an answer of Llama 2 and its kin; a vocabulary without such a name has a stop token that is not BOS.
static void prompt_end_of_text(Prompt *p) {
    const Tokenizer *t = p->tokenizer;
    int id = special_id(t, "</s>");
    for (int i = 0; i < t->n_stop_ids && id < 0; i++)
        if (t->stop_ids[i] != t->bos) id = t->stop_ids[i];
    prompt_id(p, id);
}

static void render_chatml(Prompt *p, const Template *t, Message m) {
    prompt_mark(p, "<|im_start|>");
    prompt_string(p, role_name(m.role));
    prompt_string(p, "\n");
    // What an earlier answer thought is not repeated.
    for (char *end; m.role == ASSISTANT && t->thinks && (end = memmem(m.text, m.len, "</think>", 8)) != NULL;) {
        end += 8;
        while (end < m.text + m.len && *end == '\n') end++;
        m.len -= (size_t)(end - m.text);
        m.text = end;
    }
    prompt_message(p, m);
    prompt_mark(p, "<|im_end|>");
    prompt_string(p, "\n");
}

static void render_llama3(Prompt *p, const Template *t, Message m) {
    prompt_mark(p, "<|start_header_id|>");
    prompt_string(p, role_name(m.role));
    prompt_mark(p, "<|end_header_id|>");
    prompt_string(p, "\n\n");
    if (m.role == SYSTEM && t->dated)
        prompt_string(p, "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n");
    prompt_message(p, message_trimmed(m));
    prompt_mark(p, "<|eot_id|>");
}

// Llama 2 and Mistral have no role for the system: it speaks at the beginning of the first message of the user.
static void render_inst(Prompt *p, const Template *t, Message system, Message m, bool first) {
    bool llama = t->kind == LLAMA_2, marks = special_id(p->tokenizer, "[INST]") >= 0;
    if (m.role == ASSISTANT) {
        if (llama || marks) prompt_string(p, " ");
        prompt_message(p, llama ? message_trimmed(m) : m);
        if (llama) prompt_string(p, " ");
        prompt_end_of_text(p);
        return;
    }
    if (llama && !first) prompt_id(p, p->tokenizer->bos);
    Text said = {0}; // by the system, and by the user
    if (first && system.len) {
        if (llama) text_append(&said, "<<SYS>>\n", 8);
        text_append(&said, system.text, system.len);
        if (llama) text_append(&said, "\n<</SYS>>", 9);
        text_append(&said, "\n\n", 2);
    }
    text_append(&said, m.text, m.len);
    Message all = {USER, said.data, said.len};
    prompt_mark(p, "[INST]");
    prompt_string(p, " ");
    prompt_message(p, llama ? message_trimmed(all) : all);
    if (!marks || llama) prompt_string(p, " ");
    prompt_mark(p, "[/INST]");
    free(said.data);
}

static void render_zephyr(Prompt *p, Message m) {
    prompt_string(p, "<|");
    prompt_string(p, role_name(m.role));
    prompt_string(p, "|>\n");
    prompt_message(p, m);
    prompt_end_of_text(p);
    prompt_string(p, "\n");
}

// A conversation as ids, up to where the assistant's next answer begins.
static Ids template_render(const Template *t, const Tokenizer *tokenizer, const Message *messages, int n) {
    Prompt p = {.tokenizer = tokenizer};
    Message none = {SYSTEM, NULL, 0}, fallback = {SYSTEM, (char *)t->system, t->system_len};
    bool has_system = n > 0 && messages[0].role == SYSTEM, inst = t->kind == LLAMA_2 || t->kind == MISTRAL;
    Message system = has_system ? messages[0] : none;
    if (tokenizer->bos >= 0 && (tokenizer->add_bos || inst || t->kind == LLAMA_3)) prompt_id(&p, tokenizer->bos);
    if (t->kind == CHATML && !has_system && t->system_len) render_chatml(&p, t, fallback);
    if (t->kind == LLAMA_3 && !has_system && t->dated) render_llama3(&p, t, none);
    for (int i = 0; i < n; i++) {
        Message m = messages[i];
        if (t->kind == CHATML) render_chatml(&p, t, m);
        if (t->kind == LLAMA_3) render_llama3(&p, t, m);
        if (t->kind == ZEPHYR) render_zephyr(&p, m);
        if (t->kind == PLAIN_TEXT) prompt_message(&p, m);
        if (inst && m.role != SYSTEM) render_inst(&p, t, system, m, i == (has_system ? 1 : 0));
    }
    if (t->kind == CHATML) {
        prompt_mark(&p, "<|im_start|>");
        prompt_string(&p, t->thinks && t->silent ? "assistant\n<think>\n\n</think>\n\n" : "assistant\n");
    } else if (t->kind == LLAMA_3) {
        prompt_mark(&p, "<|start_header_id|>");
        prompt_string(&p, "assistant");
        prompt_mark(&p, "<|end_header_id|>");
        prompt_string(&p, "\n\n");
    } else if (t->kind == ZEPHYR) prompt_string(&p, "<|assistant|>\n");
    prompt_flush(&p);
    free(p.pending.data);
    return p.ids;
}

// ---------------------------------------------------------------------------------------------------------------------
// §16 Terminal
//
// Reading a message from a person. The terminal is put into raw mode, where it hands over each key at once and draws
// nothing itself; we keep the line and draw it anew after each key, on one row of the screen, the part around the cursor
// where it is longer. A block of text that is pasted comes between two marks (bracketed paste), so that its line breaks
// are text. Ref: ECMA-48 for the sequences.

static struct termios terminal_before; // to be restored, whatever happens
static bool terminal_is_raw;

static void terminal_restore(void) {
    if (!terminal_is_raw) return;
    terminal_is_raw = false;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &terminal_before);
    fputs("\033[?2004l", stderr); // no more bracketed paste
}

static void on_end_signal(int number) { // ends the process as this signal does, but leaves the terminal as it was
    tcsetattr(STDIN_FILENO, TCSADRAIN, &terminal_before);
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
    static const uint32_t zero[][2] = {
        {0x300, 0x36f}, {0x1ab0, 0x1aff}, {0x200b, 0x200f}, {0x20d0, 0x20ff}, {0xfe00, 0xfe0f}};
    static const uint32_t wide[][2] = {{0x1100, 0x115f},   {0x2e80, 0x303e},   {0x3041, 0xa4cf},   {0xac00, 0xd7a3},
                                       {0xf900, 0xfaff},   {0xfe30, 0xfe6f},   {0xff00, 0xff60},   {0xffe0, 0xffe6},
                                       {0x1f300, 0x1f64f}, {0x1f680, 0x1f6ff}, {0x1f900, 0x1f9ff}, {0x20000, 0x3fffd}};
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++)
        if (c >= zero[i][0] && c <= zero[i][1]) return 0;
    for (size_t i = 0; i < sizeof wide / sizeof *wide; i++)
        if (c >= wide[i][0] && c <= wide[i][1]) return 2;
    return 1;
}

typedef struct {
    Text text;
    size_t cursor;        // byte in front of which the next character goes
    const char *label;    // what stands in front of the line
    Text *history;        // [n_history] earlier messages
    int n_history, shown; // which of them is shown; n_history: none
} Line;

// The character that begins (direction 1) or ends (-1) at a byte: how many bytes it has. 0: there is none.
static size_t line_step(const Line *l, size_t at, int direction) {
    if (direction > 0) return at < l->text.len ? (size_t)max_int(1, utf8_scan(l->text.data + at, l->text.len - at)) : 0;
    size_t n = 0;
    while (at > n && (l->text.data[at - ++n] & 0xc0) == 0x80 && n < 4) {
    }
    return n;
}

// What one character looks like goes to `out` (or nowhere): itself, or a sign for a line break or other control
// character. Returns its width.
static int line_glyph(const Line *l, size_t at, size_t n, Text *out) {
    unsigned char c = (unsigned char)l->text.data[at];
    if (out && c == '\n') text_append(out, "\xe2\x86\xb5", 3); // an arrow
    else if (out && (c < 32 || c == 127)) text_append(out, "?", 1);
    else if (out) text_append(out, l->text.data + at, n);
    return n > 1 ? character_width(utf8_decode(l->text.data + at, (int)n)) : 1;
}

static void line_draw(const Line *l) {
    struct winsize size = {0};
    int columns = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) || size.ws_col < 20 ? 80 : size.ws_col;
    int room = columns - (int)strlen(l->label) - 1, width = 0;
    size_t from = l->cursor;
    for (size_t n; (n = line_step(l, from, -1)) > 0; from -= n) { // as much in front of the cursor as there is room for
        int w = line_glyph(l, from - n, n, NULL);
        if (width + w > room) break;
        width += w;
    }
    int column = (int)strlen(l->label) + width;
    width = 0;
    Text out = {0};
    text_append(&out, "\r", 1);
    text_append(&out, l->label, strlen(l->label));
    for (size_t at = from, n; (n = line_step(l, at, 1)) > 0; at += n) {
        Text glyph = {0};
        int w = line_glyph(l, at, n, &glyph);
        bool fits = width + w <= room;
        if (fits) text_append(&out, glyph.data, glyph.len);
        free(glyph.data);
        if (!fits) break;
        width += w;
    }
    char move[40];
    text_append(&out, move, (size_t)snprintf(move, sizeof move, "\033[K\r\033[%dC", column));
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

static bool line_is_space(const Line *l, size_t at) {
    return isspace((unsigned char)l->text.data[at]);
}

// Where the word in front of the cursor begins, or the one behind it ends.
static size_t line_word(const Line *l, int direction) {
    size_t at = l->cursor;
    if (direction < 0) {
        while (at > 0 && line_is_space(l, at - 1)) at--;
        while (at > 0 && !line_is_space(l, at - 1)) at--;
    } else {
        while (at < l->text.len && line_is_space(l, at)) at++;
        while (at < l->text.len && !line_is_space(l, at)) at++;
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
    ssize_t n;
    do n = read(STDIN_FILENO, &c, 1);
    while (n < 0 && errno == EINTR);
    return n == 1 ? c : -1;
}

// A sequence that began with Escape: CSI, parameters, a final byte; or a letter with Alt.
static void line_escape(Line *l) {
    int key = read_key(), final = key;
    char parameters[16] = "";
    if (key == '[' || key == 'O')
        for (size_t n = 0; (final = read_key()) >= 0 && final < '@'; n++)
            if (n < sizeof parameters - 1) parameters[n] = (char) final;
    bool word = strchr(parameters, ';') != NULL || key == final; // Ctrl or Alt with an arrow; Alt with a letter
    if (!strcmp(parameters, "200")) {                            // pasted: text up to the closing mark
        static const char closing[] = "\033[201~";
        size_t begin = l->cursor;
        for (int c; (c = read_key()) >= 0;) {
            char byte = c == '\r' ? '\n' : (char)c;
            line_insert(l, &byte, 1);
            size_t n = sizeof closing - 1;
            if (l->cursor - begin >= n && !memcmp(l->text.data + l->cursor - n, closing, n)) {
                line_delete(l, l->cursor - n, l->cursor);
                break;
            }
        }
        return;
    }
    if (final == 'A') line_show_history(l, l->shown - 1);
    if (final == 'B') line_show_history(l, l->shown + 1);
    if (final == 'C') l->cursor = word ? line_word(l, 1) : l->cursor + line_step(l, l->cursor, 1);
    if (final == 'D') l->cursor = word ? line_word(l, -1) : l->cursor - line_step(l, l->cursor, -1);
    if (final == 'f') l->cursor = line_word(l, 1);
    if (final == 'b') l->cursor = line_word(l, -1);
    bool home = !strcmp(parameters, "1") || !strcmp(parameters, "7");
    bool end = !strcmp(parameters, "4") || !strcmp(parameters, "8");
    if (final == 'H' || (final == '~' && home)) l->cursor = 0;
    if (final == 'F' || (final == '~' && end)) l->cursor = l->text.len;
    if (final == '~' && !strcmp(parameters, "3")) line_delete(l, l->cursor, l->cursor + line_step(l, l->cursor, 1));
}

// One key. Returns true while the line goes on.
static bool line_key(Line *l, int key) {
    char byte = (char)key;
    switch (key) {
    case '\r':
    case '\n':
        if (!l->text.len || l->text.data[l->text.len - 1] != '\\') return false;
        l->text.data[l->text.len - 1] = '\n'; // a backslash at the end: the message goes on
        l->cursor = l->text.len;
        break;
    case 1: l->cursor = 0; break;                                                     // Ctrl-A
    case 5: l->cursor = l->text.len; break;                                           // Ctrl-E
    case 2: l->cursor -= line_step(l, l->cursor, -1); break;                          // Ctrl-B
    case 6: l->cursor += line_step(l, l->cursor, 1); break;                           // Ctrl-F
    case 11: l->text.len = l->cursor; break;                                          // Ctrl-K
    case 21: line_delete(l, 0, l->cursor); break;                                     // Ctrl-U
    case 23: line_delete(l, line_word(l, -1), l->cursor); break;                      // Ctrl-W
    case 12: fputs("\033[H\033[2J", stderr); break;                                   // Ctrl-L
    case 16: line_show_history(l, l->shown - 1); break;                               // Ctrl-P
    case 14: line_show_history(l, l->shown + 1); break;                               // Ctrl-N
    case 4: line_delete(l, l->cursor, l->cursor + line_step(l, l->cursor, 1)); break; // Ctrl-D
    case 8:
    case 127: line_delete(l, l->cursor - line_step(l, l->cursor, -1), l->cursor); break; // Backspace
    case 27: line_escape(l); break;
    default:
        if (key >= 32 || key == '\t') line_insert(l, &byte, 1);
    }
    return true;
}

// Whether more has been typed than was read: then drawing can wait.
static bool keys_wait(void) {
    struct pollfd stdin_poll = {STDIN_FILENO, POLLIN, 0};
    return poll(&stdin_poll, 1, 0) > 0;
}

typedef enum { READ_MESSAGE, READ_INTERRUPT, READ_END } ReadResult;

// A message from the terminal, with editing. History grows by it.
static ReadResult line_read(Line *l) {
    terminal_raw();
    l->text.len = l->cursor = 0;
    l->shown = l->n_history;
    ReadResult result = READ_MESSAGE;
    line_draw(l);
    for (int key; result == READ_MESSAGE;) {
        key = read_key();
        if (key < 0 || (key == 4 && !l->text.len)) result = READ_END;
        else if (key == 3) result = READ_INTERRUPT;
        else if (!line_key(l, key)) break;
        if (!keys_wait()) line_draw(l);
    }
    l->cursor = l->text.len;
    line_draw(l);
    terminal_restore();
    fputs("\n", stderr);
    if (result != READ_MESSAGE || !l->text.len) return result;
    Text *grown = realloc(l->history, (size_t)(l->n_history + 1) * sizeof *grown);
    if (!grown) die("out of memory: history");
    l->history = grown;
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
// §17 Sequences
//
// The autoregressive loop: run the newest token through the model, sample the next from the logits, append it, again.
// A Sequence is one text on its way; `step` takes any number of them one token further with a single forward, each by
// its own rows:
//
//   reading    a prompt, in chunks: as many of its tokens as there is room for. Only the last one's logits matter.
//   decoding   one row, its newest token.
//   guessing   behind that row, rows of drafted tokens (SPECULATIVE DECODING). The model says after each row what it
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

// How likely a token was: by the logits, and as the sampler saw it, behind temperature, top-k, min-p and top-p.
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
    int n_scores, scores_cap;
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
    bool stopped = false;
    for (int i = 0; i < q->n_stops; i++) {
        const char *stop = q->stops[i];
        size_t len = strlen(stop);
        char *found = q->held.len >= len ? memmem(q->held.data, q->held.len, stop, len) : NULL;
        if (found && (size_t)(found - q->held.data) < n) {
            n = (size_t)(found - q->held.data);
            stopped = true;
        }
        for (size_t k = len - 1; k > hold; k--) // the longest end of the text that begins a stop string
            if (k <= q->held.len && !memcmp(q->held.data + q->held.len - k, stop, k)) hold = k;
    }
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

static void score_append(Sequence *q, Score score) {
    if (q->n_scores == q->scores_cap) {
        q->scores_cap = q->scores_cap ? 2 * q->scores_cap : 64;
        Score *grown = realloc(q->scores, (size_t)q->scores_cap * sizeof *grown);
        if (!grown) die("out of memory: %d scores", q->scores_cap);
        q->scores = grown;
    }
    q->scores[q->n_scores++] = score;
}

// Score a token and the n_top best, in falling order. logits: [vocab], from which q's sampler has just picked; they are
// overwritten.
static void sequence_score(Sequence *q, float *logits, int id) {
    const Sampler *s = q->sampler;
    int at = q->n_scores;
    score_append(q, (Score){id, logits[id], 0});
    for (int i = 0; i < s->n && q->n_top > 0; i++) { // the best so far stand in order behind the token
        int n = q->n_scores - at - 1;
        if (n == q->n_top && !(logits[i] > q->scores[at + n].logprob)) continue;
        if (n < q->n_top) score_append(q, (Score){0}), n++;
        Score *best = q->scores + at + 1;
        int rank = n - 1;
        for (; rank > 0 && logits[i] > best[rank - 1].logprob; rank--) best[rank] = best[rank - 1];
        best[rank] = (Score){i, logits[i], 0};
    }
    double sum = log_sum_exp(logits, s->n);
    for (int i = at; i < q->n_scores; i++) {
        q->scores[i].logprob = (float)((double)q->scores[i].logprob - sum);
        q->scores[i].sampled = logf(sampler_probability(s, q->scores[i].id));
    }
}

// Keep the prompt as if it had been made. Its first token follows nothing, so nothing says how likely it was.
static void sequence_keep_prompt(Sequence *q, const char *text, size_t len) {
    text_append(&q->text, text, len);
    for (int i = 0; i < q->ids.len; i++) ids_append(&q->kept, q->ids.id[i]);
    for (int i = 0; i <= q->n_top; i++) score_append(q, (Score){i ? -1 : q->ids.id[0], NAN, NAN});
}

// The token that follows the first n.
static int sequence_pick(const Engine *e, Sequence *q, const float *logits, int n) {
    int id = sampler_pick(q->sampler, logits, q->ids.id, n);
    if (id < 0)
        die("%s: the logits at position %d are not finite numbers: the weights are broken", e->model->path, n - 1);
    return id;
}

// Score the token of the prompt at `pos` by the logits of the row before it.
static void sequence_score_prompt(const Engine *e, Sequence *q, float *logits, int pos) {
    uint64_t rng = q->sampler->rng;
    sequence_pick(e, q, logits, pos); // for what it would sample from
    q->sampler->rng = rng;
    sequence_score(q, logits, q->ids.id[pos]);
}

// --- drafts

// Drafts from the context: where the newest tokens have stood before, what followed them there may follow again (and,
// behind the end of the text, what follows in the draft itself). The longest match counts, the newest among equals.
// Returns n, or 0 where there is none. Ref: Saxena 2023, prompt lookup decoding.
static int draft_from_context(const Ids *ids, int n, int *draft) {
    enum { SHORTEST = 2, LONGEST = 16 };
    int longest = SHORTEST - 1, at = ids->len;
    for (int t = ids->len - 1; t > longest && longest < LONGEST; t--) {
        int len = 0;
        while (len < LONGEST && len < t && ids->id[t - 1 - len] == ids->id[ids->len - 1 - len]) len++;
        if (len > longest) longest = len, at = t;
    }
    if (at == ids->len) return 0;
    for (int i = 0; i < n; i++) draft[i] = at + i < ids->len ? ids->id[at + i] : draft[at + i - ids->len];
    return n;
}

// With how many of `ids` the cache of a sequence can go on: those that it begins with, if it still has what the next one
// may see. The last one is always to be run, for its logits. cached: [n_cached] what the sequence has computed.
static int common_prefix(const Session *s, int seq, const Ids *cached, int n_cached, const Ids *ids) {
    int common = 0;
    while (common < ids->len - 1 && common < n_cached && ids->id[common] == cached->id[common]) common++;
    return cache_reaches(s, seq, common) ? common : 0;
}

// Run ids[0..n) at positions from pos on through a model, in chunks. The logits of the last are s->logits. Returns false
// where Ctrl-C came first.
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
    for (int i = 0; i < n; i++) {
        int id = sampler_pick(d->sampler, d->session->logits, d->cached.id, d->cached.len);
        if (id < 0) die("%s: the logits are not finite numbers: the weights are broken", d->model->path);
        draft[i] = id;
        if (i == n - 1) break;
        ids_append(&d->cached, id);
        forward(d->session, &(Row){id, d->cached.len - 1, 0, true}, 1);
    }
    return n;
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
    int id = sequence_pick(e, q, logits, q->ids.len);
    q->n_made++;
    if (!q->ignores_eos && tokenizer_stops(e->tokenizer, id)) {
        sequence_finish(q, FINISH_STOP);
        return;
    }
    if (q->n_top >= 0) sequence_score(q, logits, id);
    if (q->keeps) ids_append(&q->kept, id);
    ids_append(&q->ids, id);
    decoder_push(&q->decoder, e->tokenizer, id, &q->held);
    if (sequence_show(q, false)) {
        q->done = true;
        q->finish = FINISH_STOP;
    } else if (q->n_made == q->max_new) sequence_finish(q, FINISH_LENGTH);
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

// Take n sequences a step further, with one forward: those that decode, then as much of the prompts as there is room for,
// in their order.
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
// §18 Generation
//
// From here on: what a user can ask for. Each mode is a function from the options of §24 to an exit code. Generated text
// goes to stdout, everything else to stderr.

typedef struct {
    const char *checkpoint, *tokenizer, *mode, *prompt, *file, *output, *kv, *system, *template, *session;
    const char *draft, *on_full, *rope_scaling;
    double temperature, top_p, min_p, repeat_penalty, rope_factor;
    int top_k, n_tokens, context, threads, chunk, window, stride, batch, logprobs, lookup, n_draft;
    uint64_t seed;
    bool seed_given, no_bos, special, stats, json, think, no_think, echo, ignore_eos, unordered, resume, help, man,
        version;
    const char **stops;
    int n_stops;
} Options;

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
    if (o->prompt) {
        text_append(&text, o->prompt, strlen(o->prompt));
        return text;
    }
    if (o->file) text = read_text_file(o->file);
    else if (stdin_is_redirected()) text = read_text_file("-");
    if (!exact && text.len > 0 && text.data[text.len - 1] == '\n') text.len--;
    return text;
}

enum { TINY_MODEL = 4 << 20, SCORED_ROWS = 32 }; // bytes read per token; rows whose logits are held at a time

static int choose_threads(const Options *o) {
#ifdef _OPENMP
    return o->threads ? o->threads : default_threads();
#else
    (void)o;
    return default_threads();
#endif
}

// `option` is what asks for n positions.
static void note_long_context(const char *option, int n, const Config *c) {
    if (n > c->n_ctx_train)
        fprintf(stderr, "run: note: %s %d is more than the %d positions that the model was trained for\n", option, n,
                c->n_ctx_train);
}

// The type of the key/value cache: --kv, else what suits the weights (§6).
static Type choose_kv_type(const Options *o, const Model *m) {
    if (!o->kv) return m->layers[0].q.type == F32 ? F32 : F16;
    return !strcmp(o->kv, "f32") ? F32 : !strcmp(o->kv, "f16") ? F16 : I8;
}

static const char *kv_name(Type type) {
    return type == I8 ? "q8" : type_name(type);
}

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
    if (!o->rope_scaling) return;
    bool linear = !strcmp(o->rope_scaling, "linear"), yarn = !strcmp(o->rope_scaling, "yarn");
    rope_stretch(m, linear ? ROPE_LINEAR : yarn ? ROPE_YARN : ROPE_NTK, o->rope_factor);
}

static void engine_load(Engine *e, const Options *o, bool with_tokenizer) {
    double start = seconds();
    if (!o->checkpoint)
        die_usage("expected a checkpoint, as in: run model.bin -i \"Once upon a time\" (run -h for help)");
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
static Draft *draft_open(const Options *o, const Engine *e, Sampling sampling) {
    Draft *d = alloc(1, sizeof *d, "draft");
    Checkpoint *checkpoint = checkpoint_open(o->draft);
    Tokenizer *other = has_tokenizer(checkpoint) ? tokenizer_load(checkpoint) : NULL;
    d->model = model_load(checkpoint, e->n_threads);
    checkpoint_close(checkpoint);
    choose_rope(o, d->model);
    check_draft_vocabulary(e, other, d->model);
    if (other) tokenizer_free(other);
    d->sampler = sampler_open(sampling, 0, d->model->config.vocab_size);
    d->session = session_open(d->model, choose_kv_type(o, d->model), e->session->n_ctx, 1,
                              min_int(o->chunk, e->session->n_ctx), 1, e->n_threads);
    return d;
}

static Sampling choose_sampling(const Options *o) {
    return (Sampling){(float)o->temperature, (float)o->top_p, (float)o->min_p, (float)o->repeat_penalty, o->top_k};
}

// Room for n_seqs sequences, whose prompts are run in chunks. longest: of the prompts.
static void engine_open(Engine *e, const Options *o, int n_ctx, int n_seqs, int longest) {
    bool scores_prompts = o->echo && o->logprobs >= 0; // logits for each row, so fewer rows
    e->n_draft = o->draft ? o->n_draft : o->lookup;
    e->slides = !strcmp(o->on_full, "slide");
    int chunk = min_int(scores_prompts ? min_int(o->chunk, SCORED_ROWS) : o->chunk, e->slides ? n_ctx : longest);
    int least = n_seqs * (1 + e->n_draft), rows = max_int(least, chunk + e->n_draft);
    e->session = session_open(e->model, choose_kv_type(o, e->model), n_ctx, n_seqs, rows, scores_prompts ? rows : least,
                              e->n_threads);
    if (o->draft) e->draft = draft_open(o, e, choose_sampling(o));
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

// What is to become of a sequence whose prompt is in q->ids, as the options say. n_tokens: as many may be made; 0: until
// the context is full; below 0: the default.
static void sequence_begin(const Options *o, const Engine *e, Sequence *q, int n_tokens) {
    int n_ctx = e->session->n_ctx, n = q->ids.len, wanted = n_tokens < 0 ? 256 : n_tokens;
    assert(n > 0 && n <= n_ctx);
    // The token made last needs no position. llama2.c counts the prompt's tokens as steps, all but BOS.
    int room = e->slides ? INT_MAX : n_ctx - n + 1;
    q->max_new = room;
    if (wanted) q->max_new = max_int(0, min_int(room, wanted - (e->model->counts_prompt ? n - 1 : 0)));
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

// What the cache takes where it is full, and for each token.
static void print_cache_memory(const Session *s) {
    double per_token = (double)cache_token_bytes(&s->model->config, s->kv_type);
    double all = per_token * min_int(s->n_slots, s->n_ctx) * s->n_seqs;
    fprintf(stderr, "KV cache         %s, %.0f bytes per token, at most %.1f MiB\n", kv_name(s->kv_type), per_token,
            all / (1 << 20));
}

static void print_stats(const Engine *e, Timing *t, uint64_t seed) {
    int n = min_int(t->n, LATENCIES);
    fprintf(stderr, "load             %.3f s, %d thread%s\n", e->load_seconds, e->n_threads,
            e->n_threads == 1 ? "" : "s");
    fprintf(stderr, "prefill          %.1f tokens/s (%d tokens)\n", t->n_prompt / (t->prefilled - t->start),
            t->n_prompt);
    if (t->first > 0)
        fprintf(stderr, "first token      after %.1f ms (time to first token)\n", (t->first - t->start) * 1e3);
    if (t->n > 0) {
        qsort(t->latency, (size_t)n, sizeof *t->latency, compare_doubles);
        double median = t->latency[n / 2], p99 = t->latency[(n - 1) * 99 / 100];
        fprintf(stderr, "decode           %.1f tokens/s (%d tokens)\n", t->n / (t->last - t->first), t->n);
        fprintf(stderr, "inter-token      median %.2f ms, p99 %.2f ms\n", median * 1e3, p99 * 1e3);
        if (e->n_draft)
            fprintf(stderr, "speculation      %.2f tokens per step, %d of %d drafts accepted\n",
                    (double)t->n_made / t->n_steps, t->n_accepted, t->n_drafted);
        else fprintf(stderr, "weights read     %.1f GB/s\n", (double)model_bytes_per_token(e->model) / median / 1e9);
    }
    print_cache_memory(e->session);
    fprintf(stderr, "peak memory      %.0f MiB\n", peak_memory_mib());
    fprintf(stderr, "seed             %llu\n", (unsigned long long)seed);
}

// --- JSON

// A text as a JSON string. Bytes that are no UTF-8 become U+FFFD.
static void json_string(Text *out, const char *text, size_t n) {
    text_append(out, "\"", 1);
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)text[i];
        int len = utf8_scan(text + i, n - i);
        if (len <= 0) text_format(out, "\\ufffd");
        else if (c == '"' || c == '\\') text_format(out, "\\%c", c);
        else if (c == '\n') text_format(out, "\\n");
        else if (c < 32) text_format(out, "\\u%04x", c);
        else text_append(out, text + i, (size_t)len);
        i += (size_t)max_int(1, len);
    }
    text_append(out, "\"", 1);
}

// A log-probability. That of what was cut off, or cannot be known, is null.
static void json_logprob(Text *out, const char *name, float logprob) {
    if (isfinite(logprob)) text_format(out, ", \"%s\": %.9g", name, (double)logprob);
    else text_format(out, ", \"%s\": null", name);
}

static void json_score(Text *out, const Tokenizer *t, Score score) {
    text_format(out, "{\"id\": %d, \"text\": ", score.id);
    json_string(out, t->pieces[score.id].text, (size_t)t->pieces[score.id].len);
    json_logprob(out, "logprob", score.logprob);
    json_logprob(out, "sampled_logprob", score.sampled);
}

// A list with an entry for each kept token: how likely it was, and the n_top most likely in its place.
static void json_scores(Text *out, const Tokenizer *t, const Sequence *q) {
    text_format(out, ", \"logprobs\": [");
    for (int i = 0; i < q->n_scores; i += 1 + q->n_top) {
        if (i) text_format(out, ", ");
        json_score(out, t, q->scores[i]);
        text_format(out, ", \"top\": [");
        for (int j = 1; j <= q->n_top && q->scores[i + j].id >= 0; j++) {
            if (j > 1) text_format(out, ", ");
            json_score(out, t, q->scores[i + j]);
            text_format(out, "}");
        }
        text_format(out, "]}");
    }
    text_format(out, "]");
}

// What has become of a sequence: the members of an object, and its end. In a batch, where "id" is something else, the ids
// are its "tokens", and what is the same for all is left out.
static void json_sequence(Text *out, const Options *o, const Engine *e, const Sequence *q, bool in_batch,
                          uint64_t seed) {
    static const char *const reasons[] = {"stop", "length", "interrupt"};
    const Timing *t = &q->timing;
    text_format(out, "\"text\": ");
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
    text_format(out, "}\n");
}

// --json: one object on one line.
static void print_json(const Options *o, const Engine *e, const Sequence *q, uint64_t seed) {
    Text line = {0};
    text_append(&line, "{", 1);
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
    sequence_begin(o, &e, &q, o->n_tokens);
    uint64_t seed = choose_seed(o);
    q.sampler = sampler_open(choose_sampling(o), seed, e.model->config.vocab_size);
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
// §19 Inspection
//
// What a text is to a tokenizer, what a checkpoint holds, and how well a model knows a text.

// --- tokenize: the ids of a text, on one line

static int mode_tokenize(const Options *o) {
    if (!o->prompt && !o->file && !stdin_is_redirected())
        die_usage("tokenize: expected a text in --prompt, --file or standard input");
    Checkpoint *checkpoint = o->checkpoint && !o->tokenizer ? checkpoint_open(o->checkpoint) : NULL;
    Tokenizer *t = choose_tokenizer(o, checkpoint);
    if (checkpoint) checkpoint_close(checkpoint);
    Text text = read_prompt(o, true), line = {0};
    Ids ids = {0};
    if (t->add_bos && !o->no_bos) ids_append(&ids, t->bos);
    tokenizer_encode(t, text.data, text.len, o->special, &ids);
    for (int i = 0; i < ids.len; i++) {
        char number[16];
        text_append(&line, number, (size_t)snprintf(number, sizeof number, i ? " %d" : "%d", ids.id[i]));
    }
    text_append(&line, "\n", 1);
    write_out(line.data, line.len);
    free(line.data);
    free(ids.id);
    free(text.data);
    tokenizer_free(t);
    return 0;
}

// --- info: what a checkpoint holds

// One line for a matrix, or for that of all layers: its type in the first, its size in all.
static void print_matrix(const char *name, const Matrix *w, int copies, double bytes) {
    char group[64] = "";
    if (is_quantized(w->type))
        snprintf(group, sizeof group, ", groups of %d, %s scales%s", w->group, type_name(w->scale_type),
                 w->mins ? " and minima" : "");
    printf("  %-10s %4d x [%d, %d] %s%s, %.1f MiB\n", name, copies, w->rows, w->cols, type_name(w->type), group,
           bytes / (1 << 20));
}

static void print_tokenizer(const Tokenizer *t) {
    printf("tokenizer       %s, %d pieces", strcmp(t->model, "gpt2") ? "sentencepiece-style BPE" : "byte-level BPE",
           t->n_pieces);
    if (t->pre[0]) printf(", pre-tokenizer %s", t->pre);
    printf("\nBOS             ");
    if (t->bos < 0) printf("none");
    else printf("%d%s", t->bos, t->add_bos ? "" : ", not added");
    printf("\nstop ids       ");
    for (int i = 0; i < t->n_stop_ids; i++) printf(" %d", t->stop_ids[i]);
    printf("\nchat template   %s\n", t->chat_template ? "yes" : "none");
}

static void print_config(const Model *m) {
    static const char *const scalings[] = {"", ", stretched linearly", ", stretched by YaRN", ", stretched NTK-aware"};
    const Config *c = &m->config;
    printf("dim             %d\nhidden_dim      %d\nn_layers        %d\n", c->dim, c->hidden_dim, c->n_layers);
    printf("n_heads         %d\nn_kv_heads      %d\nhead_dim        %d\n", c->n_heads, c->n_kv_heads, c->head_dim);
    printf("vocab_size      %d\ntrained context %d\n", c->vocab_size, c->n_ctx_train);
    if (c->sliding_window) printf("sliding window  %d\n", c->sliding_window);
    printf("norm epsilon    %g\nRoPE base       %g%s", (double)c->norm_eps, c->rope_base, scalings[c->rope_scaling]);
    if (c->rope_scaling) printf(" by %g from %d", c->rope_factor, c->rope_n_ctx);
    printf("\noutput          %s\n", m->tied ? "tied to the embedding" : "separate");
}

static void print_sizes(const Model *m, Type kv_type, int n_ctx, int chunk) {
    const Config *c = &m->config;
    double per_token = (double)cache_token_bytes(c, kv_type);
    int slots = min_int(n_ctx, cache_slots(c, n_ctx, chunk));
    double weights = (double)model_bytes_per_token(m) + (m->tied ? 0 : (double)matrix_bytes(&m->embed));
    printf("weights         %.1f MiB in memory, %.1f MiB read for each token\n", weights / (1 << 20),
           (double)model_bytes_per_token(m) / (1 << 20));
    printf("KV cache        %.0f bytes per token (%s), %.1f MiB for a context of %d", per_token, kv_name(kv_type),
           per_token * slots / (1 << 20), n_ctx);
    if (slots < n_ctx) printf(" (a ring of %d)", slots);
    printf("\n");
    static const char *const names[LAYER_MATRICES] = {"q", "k", "v", "o", "gate", "up", "down"};
    printf("matrices        types are those of the first layer, sizes of all\n");
    print_matrix("embed", &m->embed, 1, (double)matrix_bytes(&m->embed));
    for (int i = 0; i < LAYER_MATRICES; i++) {
        double bytes = 0;
        for (int l = 0; l < c->n_layers; l++) bytes += (double)matrix_bytes(layer_matrix(m, l, i));
        print_matrix(names[i], layer_matrix(m, 0, i), c->n_layers, bytes);
    }
    if (!m->tied) print_matrix("output", &m->output, 1, (double)matrix_bytes(&m->output));
}

static int mode_info(const Options *o) {
    if (!o->checkpoint) die_usage("info: expected a checkpoint, as in: run model.bin -m info");
    Checkpoint *checkpoint = checkpoint_open(o->checkpoint);
    Tokenizer *t = has_tokenizer(checkpoint) ? tokenizer_load(checkpoint) : NULL;
    printf("file            %s\n", o->checkpoint);
    if (checkpoint->gguf && !checkpoint->gguf->n_tensors) {
        String arch = gguf_string(checkpoint->gguf, "general.architecture");
        char name[96];
        snprintf(name, sizeof name, "%.*s", shown(arch), arch.text);
        printf("format          GGUF version %d, a vocabulary alone\narchitecture    ", checkpoint->gguf->version);
        print_escaped(stdout, name);
        printf("\n");
        print_tokenizer(t);
    } else {
        Model *m = model_load(checkpoint, choose_threads(o));
        choose_rope(o, m);
        printf("format          %s\n", m->format);
        if (m->name[0]) printf("name            ");
        print_escaped(stdout, m->name);
        if (m->name[0]) printf("\n");
        print_config(m);
        if (t) print_tokenizer(t);
        print_sizes(m, choose_kv_type(o, m), choose_context(o, &m->config), o->chunk);
        model_free(m);
    }
    write_out("", 0);
    if (t) tokenizer_free(t);
    checkpoint_close(checkpoint);
    return 0;
}

// --- perplexity: how surprised a model is by a text
//
// perplexity = exp(mean of -log p(token | what stands before it)). A text longer than the window is cut into windows
// that overlap: each begins with BOS and holds window - 1 tokens of text, the next starts `stride` tokens later, and
// in each only those tokens count that no earlier window has scored. So every token counts once, with some context
// before it. A model without BOS has the token before the window in its place, and does not score the first of the
// text.

typedef struct {
    double sum, sum_of_squares; // of -log p
    size_t n, bytes;            // tokens scored, and the bytes they stand for
} Surprise;

// Score the tokens of one window, ids[0..n) behind `lead`, from index `first` on.
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
    if (!o->prompt && !o->file && !stdin_is_redirected())
        die_usage("perplexity: expected a text in --file, --prompt or standard input");
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
    write_out("", 0);
    free(text.data);
    free(ids.id);
    engine_free(&e);
    return interrupted ? 130 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §20 Chat
//
// A conversation: messages in, answers out. For every answer the whole conversation is rendered to ids (§15); of these
// the cache already holds a common prefix, and only what follows is run through the model. So a turn costs its own
// tokens, whatever was changed (a new system prompt, a turn taken back) costs what comes after it, and there is no other
// state to keep in step.

typedef struct {
    Engine *engine;
    const Options *options;
    Template template;
    Sampler *sampler;
    Message *messages;
    int n_messages;
    Ids cached;    // the ids whose keys and values the cache holds
    Timing timing; // of the last answer
    uint64_t seed;
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

static void chat_append(Chat *c, Role role, const char *text, size_t len) {
    Message *grown = realloc(c->messages, (size_t)(c->n_messages + 1) * sizeof *grown);
    char *copy = malloc(len + 1);
    if (!grown || !copy) die("out of memory: a message of %zu bytes", len);
    c->messages = grown;
    if (len) memcpy(copy, text, len);
    copy[len] = 0;
    c->messages[c->n_messages++] = (Message){role, copy, len};
}

static void chat_remove(Chat *c, int first, int n) {
    for (int i = first; i < first + n; i++) free(c->messages[i].text);
    memmove(c->messages + first, c->messages + first + n, (size_t)(c->n_messages - first - n) * sizeof *c->messages);
    c->n_messages -= n;
}

static bool chat_has_system(const Chat *c) {
    return c->n_messages > 0 && c->messages[0].role == SYSTEM;
}

static void chat_set_system(Chat *c, const char *text) {
    if (chat_has_system(c)) chat_remove(c, 0, 1);
    if (!*text) return;
    chat_append(c, SYSTEM, text, strlen(text));
    Message system = c->messages[c->n_messages - 1];
    memmove(c->messages + 1, c->messages, (size_t)(c->n_messages - 1) * sizeof *c->messages);
    c->messages[0] = system;
}

// Where the next turn of the user after message i begins.
static int chat_next_turn(const Chat *c, int i) {
    while (++i < c->n_messages && c->messages[i].role != USER) {
    }
    return i;
}

// How many tokens the last message takes with nothing but the system prompt.
static int chat_least(const Chat *c) {
    Message least[2];
    int n = 0;
    if (chat_has_system(c)) least[n++] = c->messages[0];
    least[n++] = c->messages[c->n_messages - 1];
    Ids ids = template_render(&c->template, c->engine->tokenizer, least, n);
    free(ids.id);
    return ids.len;
}

// The conversation as ids, with room for an answer: the oldest turns are dropped whole until a quarter of the context is
// free. The system prompt and the last message stay.
static Ids chat_render(Chat *c) {
    int n_ctx = c->engine->session->n_ctx, dropped = 0;
    for (;;) {
        Ids ids = template_render(&c->template, c->engine->tokenizer, c->messages, c->n_messages);
        int first = chat_has_system(c), next = chat_next_turn(c, first);
        if (ids.len <= n_ctx - n_ctx / 4 || next >= c->n_messages) {
            if (dropped)
                chat_say(c, "[the context of %d tokens is full: the oldest %s dropped]", n_ctx,
                         dropped == 1 ? "turn was" : "turns were");
            return ids;
        }
        free(ids.id);
        chat_remove(c, first, next - first);
        dropped++;
    }
}

static void chat_print_stats(Chat *c) {
    if (c->colours) fputs("\033[2m", stderr);
    print_stats(c->engine, &c->timing, c->seed);
    if (c->colours) fputs("\033[0m", stderr);
}

// Answer the last message. Ctrl-C ends the answer; what was said stays.
static void chat_answer(Chat *c) {
    Engine *e = c->engine;
    const Options *o = c->options;
    int n_ctx = e->session->n_ctx, least = chat_least(c);
    if (least >= n_ctx) {
        chat_say(c, "[a message of %d tokens does not fit into a context of %d (--context N): it is dropped]", least,
                 n_ctx);
        chat_remove(c, c->n_messages - 1, 1);
        return;
    }
    Sequence q = {.streams = !o->json, .keeps = true, .stops = o->stops, .n_stops = o->n_stops, .sampler = c->sampler};
    q.ids = chat_render(c);
    q.n_cached = common_prefix(e->session, 0, &c->cached, c->cached.len, &q.ids);
    int room = e->slides ? INT_MAX : n_ctx - q.ids.len, wanted = max_int(0, o->n_tokens);
    q.max_new = wanted ? min_int(wanted, room) : room;
    q.n_top = min_int(o->logprobs, e->model->config.vocab_size);
    q.ignores_eos = o->ignore_eos;
    interrupted = 0;
    catch_interrupt();
    sequence_run(e, &q);
    signal(SIGINT, SIG_DFL);
    interrupted = 0;
    if (o->json) print_json(o, e, &q, c->seed);
    else write_out("\n", 1);
    c->timing = q.timing;
    chat_append(c, ASSISTANT, q.text.data, q.text.len);
    free(c->cached.id);
    c->cached = q.ids;
    c->cached.len = q.n_cached;
    q.ids = (Ids){0};
    if (q.finish == FINISH_INTERRUPTED) chat_say(c, "[stopped]");
    if (q.finish == FINISH_LENGTH && q.max_new == room) chat_say(c, "[the context of %d tokens is full]", n_ctx);
    if (o->stats && !o->json) chat_print_stats(c);
    sequence_free(&q);
}

// --- sessions: a conversation in a file
//
//   "run.chat", version, fingerprint of the model, type of the cache, number of messages and of ids      8 + 5 * 8 bytes
//   each message: role, length, bytes; the ids; for each layer and kv head the keys and values of these ids
//   a checksum of all that (FNV-1a, 64 bits)

enum { SESSION_VERSION = 2 };
static const uint64_t FNV_START = 14695981039346656037u;

static uint64_t fnv64(uint64_t h, const void *bytes, size_t n) {
    for (size_t i = 0; i < n; i++) h = (h ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    return h;
}

// What tells this model from others: its hyperparameters, how it turns, and some of each matrix.
static uint64_t model_fingerprint(const Model *m) {
    enum { SAMPLES = 256 };
    const Config *c = &m->config;
    const int shape[] = {c->dim, c->hidden_dim, c->n_layers, c->n_heads, c->n_kv_heads, c->head_dim, c->vocab_size};
    uint64_t h = fnv64(FNV_START, shape, sizeof shape);
    h = fnv64(h, m->rope_freqs, (size_t)c->head_dim / 2 * sizeof *m->rope_freqs);
    h = fnv64(h, &m->rope_magnitude, sizeof m->rope_magnitude);
    for (int i = 0; i < c->n_layers * LAYER_MATRICES + 2; i++) {
        const Matrix *w =
            i < 2 ? (i ? &m->output : &m->embed) : layer_matrix(m, (i - 2) / LAYER_MATRICES, (i - 2) % LAYER_MATRICES);
        size_t n = matrix_panels(w) * panel_words(w);
        for (size_t k = 0; k < SAMPLES; k++) h = fnv64(h, (const uint32_t *)w->panels + n * k / SAMPLES, 4);
    }
    return h;
}

// 4-byte words of the cache that n positions take: of the keys, and of the values, of one kv head.
static size_t saved_key_words(const Session *s, int n) {
    return pad((size_t)n, PANEL) * key_words(&s->model->config, s->kv_type);
}

static size_t saved_value_words(const Session *s, int n) {
    return pad((size_t)n, 2) * value_words(&s->model->config, s->kv_type);
}

// The name of a file while it is not whole.
static Text partial_name(const char *path) {
    Text name = {0};
    text_append(&name, path, strlen(path));
    text_append(&name, ".partial", sizeof ".partial");
    return name;
}

// Why a conversation cannot be saved there, or NULL: what is there already must be one.
static const char *chat_obstacle(const char *path) {
    struct stat status;
    char magic[8] = {0};
    if (!stat(path, &status)) {
        FILE *file = S_ISREG(status.st_mode) ? fopen(path, "rb") : NULL;
        size_t n = file ? fread(magic, 1, sizeof magic, file) : 0;
        if (file) fclose(file);
        return file && (n == 0 || !memcmp(magic, "run.chat", sizeof magic)) ? NULL : "is not a saved conversation";
    }
    Text partial = partial_name(path);
    FILE *file = fopen(partial.data, "wb");
    const char *obstacle = file ? NULL : strerror(errno);
    if (file) {
        fclose(file);
        remove(partial.data);
    }
    free(partial.data);
    return obstacle;
}

static bool chat_save(const Chat *c, const char *path) {
    const Session *s = c->engine->session;
    const Config *config = &s->model->config;
    int n_cached = s->lost[0] > 0 ? 0 : c->cached.len; // a ring that has lost the beginning is not worth it
    Text t = {0};
    text_append(&t, "run.chat", 8);
    uint64_t header[] = {SESSION_VERSION, model_fingerprint(s->model), (uint64_t)s->kv_type, (uint64_t)c->n_messages,
                         (uint64_t)n_cached};
    text_append(&t, header, sizeof header);
    for (int i = 0; i < c->n_messages; i++) {
        uint64_t head[] = {(uint64_t)c->messages[i].role, c->messages[i].len};
        text_append(&t, head, sizeof head);
        text_append(&t, c->messages[i].text, c->messages[i].len);
    }
    text_append(&t, c->cached.id, (size_t)n_cached * sizeof *c->cached.id);
    for (int l = 0; l < config->n_layers; l++)
        for (int h = 0; h < config->n_kv_heads; h++) {
            text_append(&t, cache_keys(s, 0, l, h), saved_key_words(s, n_cached) * 4);
            text_append(&t, cache_values(s, 0, l, h), saved_value_words(s, n_cached) * 4);
        }
    uint64_t sum = fnv64(FNV_START, t.data, t.len);
    text_append(&t, &sum, sizeof sum);
    Text partial = partial_name(path);
    FILE *file = fopen(partial.data, "wb");
    bool written = file && fwrite(t.data, 1, t.len, file) == t.len;
    written = file && !fclose(file) && written && !rename(partial.data, path);
    if (!written) {
        chat_say(c, "run: %s: cannot write: %s", path, strerror(errno));
        remove(partial.data);
    } else chat_say(c, "[saved %d messages, %.1f MiB: %s]", c->n_messages, (double)t.len / (1 << 20), path);
    free(partial.data);
    free(t.data);
    return written;
}

static void chat_load(Chat *c, const char *path) {
    Session *s = c->engine->session;
    const Config *config = &s->model->config;
    Mapping file = map_file(path);
    Reader r = {path, file.data, file.size, 0};
    if (file.size < 56 || memcmp(reader_take(&r, 8, "magic"), "run.chat", 8))
        die("%s: is not a saved conversation", path);
    uint64_t sum = fnv64(FNV_START, file.data, file.size - 8), saved;
    memcpy(&saved, file.data + file.size - 8, 8);
    uint64_t version = reader_u64(&r, "version"), fingerprint = reader_u64(&r, "fingerprint"),
             type = reader_u64(&r, "type");
    if (version != SESSION_VERSION)
        die("%s: expected version %d, got %llu", path, SESSION_VERSION, (unsigned long long)version);
    if (sum != saved) die("%s: the saved conversation is damaged: its checksum is wrong", path);
    if (fingerprint != model_fingerprint(s->model))
        die("%s: was saved with another model than %s, or with another --rope-scaling", path, s->model->path);
    if (type != (uint64_t)s->kv_type)
        die("%s: was saved with --kv %s, not %s", path, type <= I8 ? kv_name((Type)type) : "?", kv_name(s->kv_type));
    uint64_t n_messages = reader_u64(&r, "messages"), n_ids = reader_u64(&r, "ids");
    for (uint64_t i = 0; i < n_messages; i++) {
        uint64_t role = reader_u64(&r, "role"), len = reader_u64(&r, "length");
        if (role > ASSISTANT || len > r.size)
            die("%s: message %llu: expected a role and a length, got %llu and %llu", path, (unsigned long long)i,
                (unsigned long long)role, (unsigned long long)len);
        chat_append(c, (Role)role, (const char *)reader_take(&r, len, "message"), len);
    }
    if (n_ids > (uint64_t)s->n_ctx)
        die("%s: needs a context of %llu tokens, got %d (--context N)", path, (unsigned long long)n_ids, s->n_ctx);
    if (n_ids > (uint64_t)s->n_slots) n_ids = 0; // a ring too small for what was saved: it is computed again
    for (uint64_t i = 0; i < n_ids; i++) ids_append(&c->cached, reader_i32(&r, "ids"));
    for (int l = 0; l < config->n_layers; l++)
        for (int h = 0; h < config->n_kv_heads; h++) {
            size_t keys = saved_key_words(s, (int)n_ids) * 4, values = saved_value_words(s, (int)n_ids) * 4;
            memcpy(cache_keys(s, 0, l, h), reader_take(&r, keys, "keys"), keys);
            memcpy(cache_values(s, 0, l, h), reader_take(&r, values, "values"), values);
        }
    chat_say(c, "[%d messages from %s]", c->n_messages, path);
    unmap_file(&file);
}

// --- commands

static bool chat_undo(Chat *c) {
    int last = c->n_messages - 1;
    while (last >= 0 && c->messages[last].role != USER) last--;
    if (last < 0) return false;
    chat_remove(c, last, c->n_messages - last);
    return true;
}

static const char chat_help[] = "/reset           begin anew; the system prompt stays\n"
                                "/system TEXT     another system prompt (none: without one)\n"
                                "/undo            take back the last message and its answer\n"
                                "/regen           another answer to the last message\n"
                                "/stats           speed and memory of the last answer\n"
                                "/save FILE       write the conversation; --session FILE goes on with it\n"
                                "/exit            end (also Ctrl-D); Ctrl-C stops an answer\n"
                                "A backslash at the end of a line continues it. A pasted block is one message.";

// A line that begins with a slash. Returns false at /exit.
static bool chat_command(Chat *c, char *line) {
    char *argument = line + strcspn(line, " ");
    if (*argument) *argument++ = 0;
    if (!strcmp(line, "/exit") || !strcmp(line, "/quit")) return false;
    if (!strcmp(line, "/help")) chat_say(c, "%s", chat_help);
    else if (!strcmp(line, "/reset")) chat_remove(c, chat_has_system(c), c->n_messages - chat_has_system(c));
    else if (!strcmp(line, "/system")) chat_set_system(c, argument);
    else if (!strcmp(line, "/stats")) {
        if (c->timing.n_prompt) chat_print_stats(c);
        else chat_say(c, "[no answer yet]");
    } else if (!strcmp(line, "/save")) {
        const char *obstacle = *argument ? chat_obstacle(argument) : NULL;
        if (obstacle) chat_say(c, "run: %s: cannot write: %s", argument, obstacle);
        else if (*argument) chat_save(c, argument);
        else chat_say(c, "[/save FILE]");
    } else if (!strcmp(line, "/undo")) chat_say(c, chat_undo(c) ? "[taken back]" : "[nothing to take back]");
    else if (!strcmp(line, "/regen")) {
        while (c->n_messages && c->messages[c->n_messages - 1].role == ASSISTANT) chat_remove(c, c->n_messages - 1, 1);
        if (c->n_messages && c->messages[c->n_messages - 1].role == USER) chat_answer(c);
        else chat_say(c, "[nothing to answer]");
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
        ReadResult result = typed ? line_read(&line) : line_read_plain(&line);
        if (result == READ_END || (result == READ_INTERRUPT && warned)) break;
        warned = result == READ_INTERRUPT;
        if (warned) chat_say(c, "[Ctrl-C again, or /exit, ends]");
        if (warned || !line.text.len) continue;
        text_append(&line.text, "", 1); // ends it
        if (*line.text.data == '/') {
            if (!chat_command(c, line.text.data)) break;
            continue;
        }
        chat_append(c, USER, line.text.data, line.text.len - 1);
        chat_answer(c);
    }
    line_free(&line);
}

static int mode_chat(const Options *o) {
    Engine e = {0};
    engine_load(&e, o, true);
    int n_ctx = choose_context(o, &e.model->config);
    engine_open(&e, o, n_ctx, 1, n_ctx);
    Chat c = {.engine = &e, .options = o, .seed = choose_seed(o)};
    c.template = template_choose(o->template, e.tokenizer->chat_template, e.tokenizer->path);
    c.template.silent = o->no_think;
    c.sampler = sampler_open(choose_sampling(o), c.seed, e.model->config.vocab_size);
    c.colours = isatty(STDERR_FILENO) && !getenv("NO_COLOR");
    const char *obstacle = o->session ? chat_obstacle(o->session) : NULL;
    if (obstacle) die("%s: cannot write: %s", o->session, obstacle);
    if (o->session && !access(o->session, F_OK)) chat_load(&c, o->session);
    if (o->system) chat_set_system(&c, o->system);
    if (isatty(STDIN_FILENO))
        chat_say(&c, "%s, template %s. /help lists commands.", e.model->name[0] ? e.model->name : o->checkpoint,
                 template_names[c.template.kind]);
    if (o->file && strcmp(o->file, "-") && !freopen(o->file, "rb", stdin))
        die("%s: cannot open: %s", o->file, strerror(errno));
    chat_loop(&c);
    bool saved = !o->session || chat_save(&c, o->session);
    chat_remove(&c, 0, c.n_messages);
    free(c.messages);
    free(c.cached.id);
    sampler_free(c.sampler);
    engine_free(&e);
    return saved ? 0 : 1;
}

// ---------------------------------------------------------------------------------------------------------------------
// §21 Requests
//
// What a batch is asked for: a prompt a line, or JSON Lines, an object a line, of which all but `prompt` may be missing:
//
//     {"prompt": "Once", "id": "a1", "max_tokens": 50, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05,
//      "repeat_penalty": 1.1, "seed": 7, "stop": ["\n\n", "END"]}
//
// What is missing or null is as the options say. Anything else in a line makes it a bad one. Ref: RFC 8259.

// A cursor over a line. The first thing that is wrong sticks, and ends it.
typedef struct {
    const char *begin, *at, *end;
    char wrong[160];
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

static bool json_is(Json *j, const char *token) {
    while (j->at < j->end && strchr(" \t\r\n", *j->at) && *j->at) j->at++;
    size_t n = strlen(token);
    if ((size_t)(j->end - j->at) < n || memcmp(j->at, token, n)) return false;
    j->at += n;
    return true;
}

static bool json_expect(Json *j, const char *token) {
    return json_is(j, token) || json_wrong(j, "expected %s", token);
}

// The 4 hexadecimal digits of \u.
static bool json_hex(Json *j, uint32_t *c) {
    *c = 0;
    for (int i = 0; i < 4; i++, j->at++) {
        if (j->at == j->end || !isxdigit((unsigned char)*j->at)) return json_wrong(j, "expected 4 digits behind \\u");
        int digit = tolower((unsigned char)*j->at);
        *c = *c << 4 | (uint32_t)(digit <= '9' ? digit - '0' : digit - 'a' + 10);
    }
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
    const char *name = j->at < j->end && *j->at ? strchr(names, *j->at) : NULL;
    if (name) {
        text_append(out, &values[name - names], 1);
        j->at++;
        return true;
    }
    uint32_t c, low;
    if (j->at == j->end || *j->at++ != 'u') return json_wrong(j, "expected one of \"\\/bfnrtu behind a backslash");
    if (!json_hex(j, &c)) return false;
    if (c >= 0xD800 && c < 0xDC00 && j->end - j->at >= 6 && j->at[0] == '\\' && j->at[1] == 'u') {
        Json second = *j;
        second.at += 2;
        if (!json_hex(&second, &low)) return json_wrong(j, "%s", second.wrong);
        if (low >= 0xDC00 && low < 0xE000) {
            c = 0x10000 + ((c - 0xD800) << 10) + (low - 0xDC00);
            j->at = second.at;
        }
    }
    append_utf8(out, c >= 0xD800 && c < 0xE000 ? 0xFFFD : c);
    return true;
}

// A string, appended to out.
static bool json_read_string(Json *j, Text *out) {
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

// Steps over digits. Returns whether there is one at least.
static bool json_digits(Json *j) {
    const char *begin = j->at;
    while (j->at < j->end && isdigit((unsigned char)*j->at)) j->at++;
    return j->at > begin;
}

// A number as it stands there. Ref: RFC 8259, section 6.
static bool json_read_number(Json *j, char *number, size_t size) {
    json_is(j, ""); // skips space
    const char *begin = j->at;
    if (j->at < j->end && *j->at == '-') j->at++;
    const char *digits = j->at;
    bool good = json_digits(j) && (*digits != '0' || j->at == digits + 1);
    if (j->at < j->end && *j->at == '.') {
        j->at++;
        good = json_digits(j) && good;
    }
    if (j->at < j->end && (*j->at == 'e' || *j->at == 'E')) {
        j->at++;
        if (j->at < j->end && (*j->at == '+' || *j->at == '-')) j->at++;
        good = json_digits(j) && good;
    }
    size_t n = (size_t)(j->at - begin);
    if (!good || n >= size) return json_wrong(j, "expected a number");
    memcpy(number, begin, n);
    number[n] = 0;
    return true;
}

static bool json_read_real(Json *j, float *value, double min, double max) {
    char number[64];
    if (!json_read_number(j, number, sizeof number)) return false;
    double x = strtod(number, NULL);
    if (!(x >= min && x <= max)) return json_wrong(j, "expected a number from %g to %g, got %s", min, max, number);
    *value = (float)x;
    return true;
}

static bool json_read_whole(Json *j, uint64_t *value, uint64_t max) {
    char number[64];
    if (!json_read_number(j, number, sizeof number)) return false;
    errno = 0;
    unsigned long long n = strtoull(number, NULL, 10);
    if (strpbrk(number, "-.eE") || errno || n > max)
        return json_wrong(j, "expected a whole number from 0 to %llu, got %s", (unsigned long long)max, number);
    *value = n;
    return true;
}

// --- requests

typedef struct {
    int line;    // of the file, from 1
    Text prompt; // as given
    Text id;     // as JSON
    int n_tokens;
    Sampling sampling;
    uint64_t seed;
    const char **stops; // [n_stops], all of them this request's own; or those of --stop
    int n_stops;
    bool own_stops, has_prompt;
} Request;

static void request_free_stops(Request *r) {
    for (int i = 0; i < r->n_stops && r->own_stops; i++) free((char *)r->stops[i]);
    if (r->own_stops) free(r->stops);
}

static void request_free(Request *r) {
    request_free_stops(r);
    free(r->prompt.data);
    free(r->id.data);
}

static bool request_add_stop(Json *j, Request *r) {
    Text stop = {0};
    bool good = json_read_string(j, &stop);
    if (good && (!stop.len || memchr(stop.data, 0, stop.len)))
        good = json_wrong(j, "expected a text that is not empty");
    const char **grown = good ? realloc(r->stops, (size_t)(r->n_stops + 1) * sizeof *grown) : NULL;
    if (good && !grown) die("out of memory: stop strings");
    if (!good) {
        free(stop.data);
        return false;
    }
    text_append(&stop, "", 1); // ends it
    r->stops = grown;
    r->stops[r->n_stops++] = stop.data;
    return true;
}

// "stop": a string or a list of strings, in place of those of --stop.
static bool request_read_stops(Json *j, Request *r) {
    request_free_stops(r);
    r->stops = NULL;
    r->n_stops = 0;
    r->own_stops = true;
    if (!json_is(j, "[")) return request_add_stop(j, r);
    if (json_is(j, "]")) return true;
    do
        if (!request_add_stop(j, r)) return false;
    while (json_is(j, ","));
    return json_expect(j, "]");
}

// "id": a string or a number, kept as it is written.
static bool request_read_id(Json *j, Request *r) {
    Text unused = {0};
    char number[64];
    json_is(j, ""); // skips space
    const char *begin = j->at, first = begin < j->end ? *begin : 0;
    if (first != '"' && first != '-' && !isdigit((unsigned char)first))
        return json_wrong(j, "expected a string or a number");
    bool good = first == '"' ? json_read_string(j, &unused) : json_read_number(j, number, sizeof number);
    free(unused.data);
    if (!good) return false;
    r->id.len = 0;
    text_append(&r->id, begin, (size_t)(j->at - begin));
    return true;
}

// The value of one member of the object.
static bool request_read_member(Json *j, Request *r, const char *name) {
    uint64_t whole = 0;
    if (json_is(j, "null")) return true; // as if it were not there
    if (!strcmp(name, "prompt")) {
        r->prompt.len = 0;
        r->has_prompt = true;
        return json_read_string(j, &r->prompt);
    }
    if (!strcmp(name, "id")) return request_read_id(j, r);
    if (!strcmp(name, "stop")) return request_read_stops(j, r);
    if (!strcmp(name, "seed")) return json_read_whole(j, &r->seed, UINT64_MAX);
    if (!strcmp(name, "temperature")) return json_read_real(j, &r->sampling.temperature, 0, 1e6);
    if (!strcmp(name, "top_p")) return json_read_real(j, &r->sampling.top_p, 0, 1);
    if (!strcmp(name, "min_p")) return json_read_real(j, &r->sampling.min_p, 0, 1);
    if (!strcmp(name, "repeat_penalty")) return json_read_real(j, &r->sampling.repeat_penalty, 1e-6, 1e6);
    bool top_k = !strcmp(name, "top_k");
    if (!top_k && strcmp(name, "max_tokens"))
        return json_wrong(j, "is not known here; known are prompt, id, max_tokens, temperature, top_p, top_k, min_p, "
                             "repeat_penalty, seed and stop");
    if (!json_read_whole(j, &whole, INT_MAX)) return false;
    *(top_k ? &r->sampling.top_k : &r->n_tokens) = (int)whole;
    return true;
}

// An object that is a request. Returns false and says in `wrong` why it is none.
static bool request_parse(Request *r, const char *line, size_t n, Text *wrong) {
    Json j = {line, line, line + n, "", 0};
    Text name = {0};
    for (int len; j.at < j.end && (len = utf8_scan(j.at, (size_t)(j.end - j.at))) > 0;) j.at += len;
    bool good = j.at == j.end || json_wrong(&j, "expected UTF-8");
    if (good) j.at = line;
    good = good && json_expect(&j, "{");
    if (good && !json_is(&j, "}")) {
        do {
            name.len = 0;
            good = json_read_string(&j, &name) && json_expect(&j, ":");
            if (memchr(name.data ? name.data : "", 0, name.len))
                good = json_wrong(&j, "a name with a zero byte is not known here");
            text_append(&name, "", 1); // ends it
            if (good && !request_read_member(&j, r, name.data)) {
                text_format(wrong, "\"%.80s\": ", name.data);
                good = false;
            }
        } while (good && json_is(&j, ","));
        good = good && (json_is(&j, "}") || json_wrong(&j, "expected , or }"));
    }
    json_is(&j, ""); // skips space
    if (good && j.at < j.end) good = json_wrong(&j, "something follows the object");
    if (good && !r->has_prompt) good = json_wrong(&j, "expected a \"prompt\"");
    if (!good) text_format(wrong, "%s (character %d)", j.wrong, j.where);
    free(name.data);
    return good;
}

// ---------------------------------------------------------------------------------------------------------------------
// §22 Batch
//
// Many prompts from a file, a number of them at once. Every place in the cache has a sequence (§17); one that is done
// makes room for the next prompt at once, in the same step as the others go on. A prompt that begins like one whose keys
// and values are in the cache takes over what they have in common, and waits for it where it is just being computed.
// Results are JSON Lines. A line that makes no sense is reported with its number, and the rest goes on.

typedef struct {
    Sequence q;
    Request request;
    bool busy, waits; // it has a request; which waits for a prefix
    int order;        // among the requests
} Place;

typedef struct {
    Text line; // what is to be written; nothing while it is not done
    int n_prompt, n_rows;
} Result;

typedef struct {
    Engine *engine;
    const Options *options;
    uint64_t seed;
    const char *name;   // of the input
    const char *output; // NULL: standard output
    Text text;          // the input
    size_t at;          // how far it has been read,
    int line;           // and which line that is
    bool json, guessed; // it is JSON Lines; by its first line, not by its name
    bool *known;        // [lines + 1]   an earlier run has the result of this line
    FILE *out;
    Place *places; // [n_places]
    int n_places;
    Result *results; // [n_results]  in the order of the input
    int n_results, results_cap, n_written;
    int n_total, n_done, n_wrong;
    long long n_tokens, n_shared;             // made; of prompts, taken over from others
    long long n_steps, n_drafted, n_accepted; // of all sequences
    double start, shown;
} Batch;

static void batch_complain(Batch *b, const char *wrong) {
    fputs(isatty(STDERR_FILENO) ? "\r\033[Krun: " : "run: ", stderr);
    print_escaped(stderr, b->name);
    fprintf(stderr, ": line %d: ", b->line);
    print_escaped(stderr, wrong);
    if (b->guessed && !b->n_wrong) fputs(" (the first line begins with {, so all are read as JSON)", stderr);
    fputc('\n', stderr);
    b->n_wrong++;
}

// How a line of the output begins: so --resume knows it again.
static void batch_head(Text *out, const Request *r) {
    text_format(out, "{\"line\": %d, \"id\": ", r->line);
    text_append(out, r->id.data, r->id.len);
    text_append(out, ", ", 2);
}

// The next line that is not blank. Returns false at the end.
static bool batch_next_line(Batch *b, const char **line, size_t *n) {
    while (b->at < b->text.len) {
        *line = b->text.data + b->at;
        const char *end = memchr(*line, '\n', b->text.len - b->at);
        *n = end ? (size_t)(end - *line) : b->text.len - b->at;
        b->at += *n + 1;
        b->line++;
        if (*n > 0 && (*line)[*n - 1] == '\r') --*n;
        size_t space = 0;
        while (space < *n && isspace((unsigned char)(*line)[space])) space++;
        if (space < *n) return true;
    }
    return false;
}

// What the present line asks for. Returns false and says why where that makes no sense.
static bool batch_parse(const Batch *b, Request *r, const char *line, size_t n, Text *wrong) {
    const Options *o = b->options;
    *r = (Request){.line = b->line, .n_tokens = o->n_tokens, .sampling = choose_sampling(o), .seed = b->seed};
    r->stops = o->stops;
    r->n_stops = o->n_stops;
    text_format(&r->id, "%d", b->line);
    if (b->json) return request_parse(r, line, n, wrong);
    text_append(&r->prompt, line, n);
    return true;
}

// The ids of a prompt that can be begun with. Returns false and says why where it cannot.
static bool batch_encode(const Batch *b, const Request *r, Ids *ids, Text *wrong) {
    int n_ctx = b->engine->session->n_ctx;
    encode_prompt(b->options, b->engine->tokenizer, r->prompt.data, r->prompt.len, ids);
    if (ids->len > n_ctx)
        text_format(wrong, "the prompt has %d tokens, but the context holds %d (--context N)", ids->len, n_ctx);
    if (!ids->len) text_format(wrong, "without a prompt and without BOS there is no token to start from");
    return !wrong->len;
}

// The next request that makes sense and is not done yet, with its ids. Returns false at the end.
static bool batch_next_request(Batch *b, Request *r, Ids *ids) {
    const char *line;
    size_t n;
    while (batch_next_line(b, &line, &n)) {
        Text wrong = {0};
        if (b->known[b->line]) continue;
        *ids = (Ids){0};
        if (batch_parse(b, r, line, n, &wrong) && batch_encode(b, r, ids, &wrong)) return true;
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
        if (common > cached) cached = common, from = i;
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
    Sequence q = {.keeps = true, .stops = r->stops, .n_stops = r->n_stops, .ids = ids};
    q.place = (int)(p - b->places);
    q.sampler = p->q.sampler;
    q.sampler->sampling = r->sampling;
    q.sampler->rng = rng_seed(r->seed);
    sequence_begin(b->options, b->engine, &q, r->n_tokens);
    bool scores_prompt = q.echo && q.n_top >= 0; // then all of it must be run
    if (q.echo) sequence_keep_prompt(&q, r->prompt.data, r->prompt.len);
    if (!scores_prompt) q.n_cached = common_prefix(b->engine->session, q.place, &p->q.ids, p->q.n_cached, &q.ids);
    q.timing.start = seconds();
    sequence_free(&p->q);
    p->q = q;
    p->busy = true;
    p->waits = !scores_prompt;
    p->order = b->n_results++;
    if (b->n_results > b->results_cap) {
        b->results_cap = 2 * b->n_results;
        b->results = realloc(b->results, (size_t)b->results_cap * sizeof *b->results);
        if (!b->results) die("out of memory: %d results", b->results_cap);
    }
    b->results[p->order] = (Result){{0}, q.ids.len, 0};
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
    json_sequence(&result->line, b->options, b->engine, &p->q, true, p->request.seed);
    result->n_rows = result->n_prompt + max_int(0, p->q.n_made - 1);
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

// Begin with the first line again.
static void batch_rewind(Batch *b) {
    bool mark = b->text.len >= 3 && !memcmp(b->text.data, "\xEF\xBB\xBF", 3); // a byte order mark
    b->at = mark ? 3 : 0;
    b->line = 0;
}

// The results of an earlier run, each of its lines to heads[number of the line of the input]. Returns how many bytes
// these take: a partial line at the end does not count.
static size_t batch_read_results(Batch *b, const Text *earlier, const char **heads, int n_lines) {
    static const char begin[] = "{\"line\": ";
    size_t at = 0, len = sizeof begin - 1;
    for (int i = 1; at < earlier->len; i++) {
        const char *line = earlier->data + at, *end = memchr(line, '\n', earlier->len - at);
        size_t left = earlier->len - at;
        bool ours = !memcmp(line, begin, left < len ? left : len);
        if (ours && !end) break;
        long number = ours && left > len ? strtol(line + len, NULL, 10) : 0; // ends at the end of the line at last
        if (number < 1 || number > n_lines || heads[number])
            die("%s: line %d: expected a result for a line of %s", b->output, i, b->name);
        heads[number] = line;
        at += (size_t)(end - line) + 1;
    }
    return at;
}

// --resume: what an earlier run has written counts, but for a line that was cut off. It must be of the same input.
static void batch_resume(Batch *b, int n_lines) {
    const char *path = b->output, *line;
    const char **heads = alloc((size_t)n_lines + 1, sizeof *heads, "lines"); // how the result of a line begins, or NULL
    Text earlier = read_text_file(path);
    size_t n, whole = batch_read_results(b, &earlier, heads, n_lines);
    for (batch_rewind(b); batch_next_line(b, &line, &n);) {
        const char *found = heads[b->line];
        heads[b->line] = NULL;
        if (!found) continue;
        Request r;
        Text head = {0}, wrong = {0};
        bool good = batch_parse(b, &r, line, n, &wrong);
        batch_head(&head, &r);
        if (!good || (size_t)(earlier.data + whole - found) < head.len || memcmp(found, head.data, head.len))
            die("%s: expected results of %s, but its line %d is another", path, b->name, b->line);
        b->known[b->line] = true;
        b->n_done++;
        request_free(&r);
        free(head.data);
    }
    for (int i = 1; i <= n_lines; i++)
        if (heads[i]) die("%s: expected results of %s, but its line %d is blank", path, b->name, i);
    if (truncate(path, (off_t)whole)) die("%s: cannot cut off a partial line: %s", path, strerror(errno));
    free(earlier.data);
    free(heads);
}

static bool same_file(const char *a, const char *b) {
    struct stat x, y;
    return !stat(a, &x) && !stat(b, &y) && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

// Whether there is something by that name that is no regular file.
static bool is_special(const char *path) {
    struct stat status;
    return !stat(path, &status) && !S_ISREG(status.st_mode);
}

// Read the input, and what an earlier run has written.
static void batch_read(Batch *b, const Options *o) {
    const char *line, *suffix = o->file ? strrchr(o->file, '.') : NULL;
    bool named = suffix && !strncmp(suffix, ".json", 5); // .jsonl, too
    size_t n;
    b->options = o;
    b->output = o->output && strcmp(o->output, "-") ? o->output : NULL;
    const char *input = o->file && strcmp(o->file, "-") ? o->file : "/dev/stdin";
    if (b->output && !o->prompt && same_file(b->output, input))
        die_usage("--output: %s is the file with the prompts", b->output);
    if (o->resume && b->output && is_special(b->output))
        die_usage("--resume: expected a regular file as --output, got %s", b->output);
    if (o->resume && !b->output) die_usage("--resume: expected --output FILE, which an earlier run has begun");
    if (!o->prompt && !o->file && !stdin_is_redirected())
        die_usage("batch: expected prompts in --file or standard input, one a line");
    b->name = o->prompt ? "--prompt" : o->file && strcmp(o->file, "-") ? o->file : "standard input";
    b->text = read_prompt(o, true);
    for (batch_rewind(b); batch_next_line(b, &line, &n);)
        if (b->n_total++ == 0) b->guessed = !named && line[strspn(line, " \t")] == '{';
    b->json = named || b->guessed;
    int n_lines = b->line;
    b->known = alloc((size_t)n_lines + 1, sizeof *b->known, "lines");
    if (o->resume && !access(b->output, F_OK)) batch_resume(b, n_lines);
    if (b->n_done && !o->seed_given && o->temperature > 0)
        fprintf(stderr, "run: note: without --seed the rest gets another seed than what is there\n");
    batch_rewind(b);
}

// What static batching would have spent: n sequences at a time, in step from the end of the shortest prompt on, each
// group until its last sequence is done (Meta's Llama 2, generate). A longer prompt is read token by token meanwhile, and
// who is done keeps computing for nothing.
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
    fprintf(stderr, "load             %.3f s, %d thread%s\n", e->load_seconds, e->n_threads,
            e->n_threads == 1 ? "" : "s");
    fprintf(stderr, "throughput       %.1f tokens/s made, %.1f rows/s, in %.2f s\n", (double)b->n_tokens / took,
            (double)e->n_rows / took, took);
    fprintf(stderr, "rows             %lld computed by continuous batching%s, %lld shared\n", e->n_rows,
            e->n_draft ? " (drafts included)" : "", b->n_shared);
    if (all)
        fprintf(stderr, "static batching  %lld rows in batches of %d, of which %lld wasted (%.0f%%)\n", all,
                b->n_places, all - useful, 100.0 * (double)(all - useful) / (double)all);
    if (e->n_draft && b->n_steps)
        fprintf(stderr, "speculation      %.2f tokens per step, %lld of %lld drafts accepted\n",
                (double)b->n_tokens / (double)b->n_steps, b->n_accepted, b->n_drafted);
    print_cache_memory(e->session);
    fprintf(stderr, "peak memory      %.0f MiB\n", peak_memory_mib());
    fprintf(stderr, "seed             %llu\n", (unsigned long long)b->seed);
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
        b.places[i].q.sampler = sampler_open(choose_sampling(o), 0, e.model->config.vocab_size);
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
    free(b.text.data);
    engine_free(&e);
    return interrupted ? 130 : b.n_wrong ? 1 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §23 Bench
//
// How fast is it, and how fast could it be? Decoding reads every weight once for each token, so its limit is a plain
// read of as many bytes; reading a prompt does a multiply-add for each weight and token, so its limit is the peak of
// that instruction. A batch is bound by both: a step takes at least the longer of the two times. Both limits are
// measured in the same run, round about with the rest, because machines are noisy: only a share of a limit measured at
// the same time says anything. Each figure is the median of the rounds, and so is each share: the median of its ratios,
// not the ratio of the medians.

enum { BENCH_ROUNDS = 5, BENCH_SEQS = 16, BENCH_FAR = 2000, BENCH_STEPS = 12 };

static const double BENCH_SECONDS = 0.02; // a measurement is repeated until it has taken as long

typedef enum { PEAK, READ, PREFILL, DECODE } FigureKind;

typedef struct {
    char name[24];
    FigureKind kind;
    int n;        // PREFILL: tokens; DECODE: sequences
    double limit; // for a share: what is reached in units of `value` where nothing but the limits holds it up
    double value[BENCH_ROUNDS], share[BENCH_ROUNDS];
} Figure;

// Multiply-adds count as two operations. The output matrix is left out: a prompt needs it once.
static double operations_per_token(const Model *m) {
    double n = 0;
    for (int l = 0; l < m->config.n_layers; l++)
        for (int i = 0; i < LAYER_MATRICES; i++) n += 2.0 * layer_matrix(m, l, i)->rows * layer_matrix(m, l, i)->cols;
    return n;
}

// A sum in 16 lanes, so that nothing but memory holds it up.
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
    size_t scale_words = panel_scales(w) * scale_bytes(w) / 4;
    uint32_t sum = read_words((const uint32_t *)w->panels + first * panel_words(w), count * panel_words(w));
    if (w->scales) sum += read_words((const uint32_t *)w->scales + first * scale_words, count * scale_words);
    if (w->mins) sum += read_words((const uint32_t *)w->mins + first * scale_words, count * scale_words);
    return sum;
}

// Bytes per second of reading the weights of a token, each thread its own stretch of each matrix.
static double measure_read(const Model *m, int n_threads) {
    double start = seconds(), bytes = 0;
    volatile uint32_t used = 0; // or the compiler may leave out all of it
    do {
        uint32_t sum = 0;
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : sum)
        for (int t = 0; t < n_threads; t++) {
            for (int l = 0; l < m->config.n_layers; l++)
                for (int i = 0; i < LAYER_MATRICES; i++) sum += read_matrix(layer_matrix(m, l, i), t, n_threads);
            sum += read_matrix(&m->output, t, n_threads);
        }
        used = used + sum;
        bytes += (double)model_bytes_per_token(m);
    } while (seconds() - start < BENCH_SECONDS);
    return bytes / (seconds() - start);
}

// n rounds of independent multiply-adds from registers, as fast as the instruction goes. Returns how many operations
// that was. What it begins with and what it ends with are volatile: so the compiler can neither foresee nor drop it.
static double kernel_peak(Type type, int n) {
    enum { CHAINS = LANES == 16 ? 16 : 12 }; // with x they fit into the registers
#define ROUNDS(chain) \
    for (int round = 0; round < n; round++) UNROLL for (int i = 0; i < CHAINS; i++) chain
    volatile float seed = 1.5f, used;
    Floats floats[CHAINS], x = floats_set(seed);
    Ints ints[CHAINS], q = ints_set((int32_t)seed);
    UNROLL for (int i = 0; i < CHAINS; i++) floats[i] = floats_set((float)i), ints[i] = ints_set(i);
    if (is_quantized(type)) ROUNDS(ints[i] = ints_dot_int8(ints[i], ints[i], q));
    else if (type == BF16) ROUNDS(floats[i] = floats_dot_bf16(floats[i], q, q));
    else ROUNDS(floats[i] = floats_fma(x, x, floats[i]));
    UNROLL for (int i = 1; i < CHAINS; i++) floats[0] = floats_fma(floats[i], floats_from_ints(ints[i]), floats[0]);
    float lanes[LANES];
    floats_store(lanes, floats[0]);
    used = lanes[0];
    (void)used;
    return 2.0 * n * CHAINS * LANES * (is_quantized(type) ? 4 : type == BF16 ? 2 : 1);
#undef ROUNDS
}

static double measure_peak(Type type, int n_threads) {
    double operations = 0, start = seconds();
#pragma omp parallel for num_threads(n_threads) schedule(static) reduction(+ : operations)
    for (int i = 0; i < n_threads; i++) operations += kernel_peak(type, 3000000);
    return operations / (seconds() - start);
}

// Tokens per second of a prompt of n tokens.
static double measure_prefill(Session *s, const int *ids, int n) {
    double start = seconds(), tokens = 0;
    do {
        prefill(s, ids, n, 0, 0);
        tokens += n;
    } while (seconds() - start < BENCH_SECONDS);
    return tokens / (seconds() - start);
}

// Tokens per second of n_seqs sequences in step, from position pos on.
static double measure_decode(Session *s, const int *ids, int n_seqs, int pos) {
    Row rows[BENCH_SEQS];
    double start = seconds(), tokens = 0;
    do
        for (int step = 0; step < BENCH_STEPS; step++) {
            for (int i = 0; i < n_seqs; i++) rows[i] = (Row){ids[step + i], pos + step, i, true};
            forward(s, rows, n_seqs);
            tokens += n_seqs;
        }
    while (seconds() - start < BENCH_SECONDS);
    return tokens / (seconds() - start);
}

static double median(const double *x) {
    double sorted[BENCH_ROUNDS];
    memcpy(sorted, x, sizeof sorted);
    qsort(sorted, BENCH_ROUNDS, sizeof *sorted, compare_doubles);
    return sorted[BENCH_ROUNDS / 2];
}

// One figure: its value; for a prompt also the time to its first token; for what has a limit, its share of it.
static void print_figure(const Options *o, const Engine *e, const Figure *f) {
    static const char *const units[][2] = {{"GOP/s", "GOP/s"}, {"GB/s", "GB/s"}, {"tokens_per_second", "tokens/s"}};
    double value = median(f->value), share = median(f->share), first = f->n / value;
    const char *unit = units[min_int(f->kind, PREFILL)][!o->json];
    bool prompt = f->kind == PREFILL, decode = f->kind == DECODE && f->n == 1;
    double rate = value * (prompt ? operations_per_token(e->model) : (double)model_bytes_per_token(e->model)) / 1e9;
    const char *rate_unit = prompt ? "GOP/s" : "GB/s";
    if (o->json) {
        printf(", \"%s\": {\"%s\": %.4g", f->name, unit, value);
        if (f->kind == PEAK) printf(", \"type\": \"%s\"", type_name(e->model->layers[0].q.type));
        if (prompt) printf(", \"first_token_seconds\": %.6f", first);
        if (prompt || decode) printf(", \"%s\": %.4g", rate_unit, rate);
        if (f->limit > 0) printf(", \"share_of_limit\": %.4f", share);
        printf("}");
        return;
    }
    printf("%-16s %8.1f %s", f->name, value, unit);
    if (f->kind == PEAK) printf(" (%s)", type_name(e->model->layers[0].q.type));
    if (prompt || decode) printf(" = %.1f %s", rate, rate_unit);
    if (f->limit > 0) printf(", %.0f%% of the limit", 100 * share);
    if (prompt) printf(", first token after %.1f ms", first * 1e3);
    printf("\n");
}

static Figure *figure_at(Figure *figures, int *n, FigureKind kind, int count, const char *format, int number) {
    Figure *f = &figures[(*n)++];
    f->kind = kind;
    f->n = count;
    snprintf(f->name, sizeof f->name, format, number);
    return f;
}

static void figure_set(Figure *f, int round, double value, double limit) {
    f->value[round] = value;
    f->limit = limit;
    f->share[round] = limit > 0 ? value / limit : 0;
}

// Fills the figures in rounds, limits and what they limit close together. Returns how many there are.
static int measure(Engine *e, const int *ids, int far, Figure *figures) {
    static const int prompts[] = {16, 128, 512}, batches[] = {1, 4, 8, 16};
    const Model *m = e->model;
    Session *s = e->session;
    double bytes = (double)model_bytes_per_token(m), operations = operations_per_token(m);
    double cache = (double)cache_token_bytes(&m->config, s->kv_type);
    int n = 0, threads = e->n_threads;
    for (int round = 0; round < BENCH_ROUNDS; round++) {
        n = 0;
        double peak = measure_peak(m->layers[0].q.type, threads);
        figure_set(figure_at(figures, &n, PEAK, 0, "peak", 0), round, peak / 1e9, 0);
        for (int i = 0; i < 3 && prompts[i] <= s->n_ctx; i++)
            figure_set(figure_at(figures, &n, PREFILL, prompts[i], "prefill_%d", prompts[i]), round,
                       measure_prefill(s, ids, prompts[i]), peak / operations);
        double read = measure_read(m, threads);
        figure_set(figure_at(figures, &n, READ, 0, "read", 0), round, read / 1e9, 0);
        figure_set(figure_at(figures, &n, DECODE, 1, "decode", 0), round, measure_decode(s, ids, 1, 0), read / bytes);
        if (!round) prefill(s, ids, far, 0, 0);
        figure_set(figure_at(figures, &n, DECODE, 1, "decode_at_%d", far), round, measure_decode(s, ids, 1, far),
                   read / (bytes + far * cache));
        for (int i = 0; i < 4; i++) {
            double step = fmax(bytes / read, batches[i] * operations / peak);
            figure_set(figure_at(figures, &n, DECODE, batches[i], "batch_%d", batches[i]), round,
                       measure_decode(s, ids, batches[i], 0), batches[i] / step);
        }
    }
    return n;
}

static int mode_bench(const Options *o) {
    Engine e = {0};
    engine_load(&e, o, false);
    const Config *c = &e.model->config;
    int n_ctx = min_int(o->context ? o->context : c->n_ctx_train, BENCH_FAR + BENCH_STEPS), far = n_ctx - BENCH_STEPS;
    if (far < 2 * BENCH_STEPS)
        die_usage("bench: expected a context of at least %d (--context), got %d", 3 * BENCH_STEPS, n_ctx);
    int rows = max_int(o->chunk, BENCH_SEQS);
    e.session = session_open(e.model, choose_kv_type(o, e.model), n_ctx, BENCH_SEQS, rows, BENCH_SEQS, e.n_threads);
    int *ids = alloc((size_t)n_ctx + BENCH_SEQS, sizeof *ids, "bench");
    for (int i = 0; i < n_ctx + BENCH_SEQS; i++) ids[i] = (int)((i * 7919LL + 3) % c->vocab_size);
    Figure figures[16] = {0};
    int n = measure(&e, ids, far, figures);
    const char *head = o->json ? "{\"load_seconds\": %.4f, \"memory_mib\": %.1f, \"threads\": %d"
                               : "load             %8.3f s\npeak memory      %8.0f MiB\nthreads          %8d\n";
    printf(head, e.load_seconds, peak_memory_mib(), e.n_threads);
    for (int i = 0; i < n; i++) print_figure(o, &e, &figures[i]);
    if (o->json) printf("}\n");
    write_out("", 0);
    free(ids);
    engine_free(&e);
    return 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §24 Command line
//
// One table says what an option is called, what it takes, where its value goes and what it is for. Parsing and help
// read the table, so neither can forget an option. llama2.c's options keep their letters and meaning.

typedef enum { FLAG, TEXT, LIST, REAL, INTEGER, SEED } Kind;

typedef struct {
    char letter; // or 0
    const char *name;
    Kind kind;
    size_t offset; // of the value in Options
    double min, max;
    const char *initial; // the default, written as a user would
    const char *argument, *help;
    const char *group; // a heading in front of it, or NULL
} Option;

#define AT(field) offsetof(Options, field)
static const Option options[] = {
    {'m', "mode", TEXT, AT(mode), 0, 0, "generate", "MODE",
     "generate, chat, tokenize, info, perplexity, batch or bench", "What to do"},
    {'i', "prompt", TEXT, AT(prompt), 0, 0, NULL, "TEXT", "the prompt, or the first message of a chat", NULL},
    {'f', "file", TEXT, AT(file), 0, 0, NULL, "FILE", "read the prompt or text from FILE; - is standard input", NULL},
    {'n', "tokens", INTEGER, AT(n_tokens), 0, INT_MAX, NULL, "N",
     "new tokens at most; 0: until the context is full (256; chat 0)", NULL},
    {0, "stop", LIST, AT(stops), 0, 0, NULL, "TEXT", "end before this text appears; may be repeated", NULL},
    {0, "ignore-eos", FLAG, AT(ignore_eos), 0, 0, NULL, NULL, "go on behind the token that ends a text", NULL},
    {'z', "tokenizer", TEXT, AT(tokenizer), 0, 0, NULL, "FILE",
     "the tokenizer (the checkpoint's own, else tokenizer.bin)", NULL},
    {0, "no-bos", FLAG, AT(no_bos), 0, 0, NULL, NULL, "do not begin with the BOS token", NULL},
    {0, "special", FLAG, AT(special), 0, 0, NULL, NULL, "find special tokens such as <|im_start|> in the text", NULL},
    {'t', "temperature", REAL, AT(temperature), 0, 1e6, "1.0", "T", "0 takes the most likely token", "Sampling"},
    {'p', "top-p", REAL, AT(top_p), 0, 1, "0.9", "P", "sample from the nucleus of mass P; 0 or 1: off", NULL},
    {'k', "top-k", INTEGER, AT(top_k), 0, INT_MAX, "0", "K", "sample from the K most likely; 0: off", NULL},
    {0, "min-p", REAL, AT(min_p), 0, 1, "0", "P", "drop tokens below P times the most likely one's probability", NULL},
    {0, "repeat-penalty", REAL, AT(repeat_penalty), 1e-6, 1e6, "1.0", "R",
     "above 1: make tokens of the text so far less likely", NULL},
    {'s', "seed", SEED, AT(seed), 0, 0, NULL, "N", "64-bit seed (from the clock; --stats shows it)", NULL},
    {'c', "context", INTEGER, AT(context), 1, 1 << 26, NULL, "N", "positions to keep (the model's, at most 4096)",
     "Context"},
    {0, "kv", TEXT, AT(kv), 0, 0, NULL, "TYPE", "key/value cache: f32, f16 or q8 (f16, but f32 for f32 weights)", NULL},
    {0, "on-full", TEXT, AT(on_full), 0, 0, "stop", "WHAT", "with a full context stop, or slide: drop the older half",
     NULL},
    {0, "rope-scaling", TEXT, AT(rope_scaling), 0, 0, NULL, "HOW",
     "stretch the context: linear, ntk or yarn (as the file says)", NULL},
    {0, "rope-factor", REAL, AT(rope_factor), 1, 1e4, NULL, "F", "by how much --rope-scaling stretches it", NULL},
    {'j', "threads", INTEGER, AT(threads), 1, 1024, NULL, "N",
     "threads (one for each physical core; one for tiny models)", "Speed"},
    {0, "chunk", INTEGER, AT(chunk), 1, 1 << 16, "256", "N", "prompt tokens that are computed together", NULL},
    {0, "lookup", INTEGER, AT(lookup), 0, MAX_DRAFT, "0", "N",
     "guess N tokens ahead from the text so far: the same text, faster", NULL},
    {0, "draft", TEXT, AT(draft), 0, 0, NULL, "MODEL", "guess with a small model of the same vocabulary", NULL},
    {0, "draft-tokens", INTEGER, AT(n_draft), 1, MAX_DRAFT, "4", "N", "with --draft: guess N tokens ahead", NULL},
    {'y', "system", TEXT, AT(system), 0, 0, NULL, "TEXT", "the system prompt", "Chat"},
    {0, "template", TEXT, AT(template), 0, 0, NULL, "NAME",
     "plain, llama-2, llama-3, chatml, mistral or zephyr (the file's)", NULL},
    {0, "session", TEXT, AT(session), 0, 0, NULL, "FILE",
     "go on with the conversation in FILE; save it there at the end", NULL},
    {0, "think", FLAG, AT(think), 0, 0, NULL, NULL, "Qwen 3 thinks before it answers (its default)", NULL},
    {0, "no-think", FLAG, AT(no_think), 0, 0, NULL, NULL, "Qwen 3 answers at once", NULL},
    {'b', "batch", INTEGER, AT(batch), 1, 4096, "16", "N", "sequences at once", "Batch"},
    {'o', "output", TEXT, AT(output), 0, 0, NULL, "FILE", "where the results go (standard output)", NULL},
    {0, "unordered", FLAG, AT(unordered), 0, 0, NULL, NULL, "results as they finish, not in the order of the input",
     NULL},
    {0, "resume", FLAG, AT(resume), 0, 0, NULL, NULL, "go on with the --output of an interrupted run", NULL},
    {0, "window", INTEGER, AT(window), 2, 1 << 26, NULL, "N", "tokens in a window (512)", "Perplexity"},
    {0, "stride", INTEGER, AT(stride), 1, 1 << 26, NULL, "N", "tokens from window to window (half of it)", NULL},
    {0, "json", FLAG, AT(json), 0, 0, NULL, NULL, "generate, chat, bench: results as JSON", "Output"},
    {0, "logprobs", INTEGER, AT(logprobs), 0, 1000, NULL, "N",
     "score each token and the N likeliest (with --json, in a batch)", NULL},
    {0, "echo", FLAG, AT(echo), 0, 0, NULL, NULL, "show and score the prompt, too (with --json, in a batch)", NULL},
    {0, "stats", FLAG, AT(stats), 0, 0, NULL, NULL, "speed, memory and seed, on standard error", NULL},
    {'h', "help", FLAG, AT(help), 0, 0, NULL, NULL, "this text", NULL},
    {0, "man", FLAG, AT(man), 0, 0, NULL, NULL, "the manual page: run --man | man -l -", NULL},
    {0, "version", FLAG, AT(version), 0, 0, NULL, NULL, "the version", NULL},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

static const struct {
    const char *name;
    int (*run)(const Options *);
} modes[] = {{"generate", mode_generate},     {"chat", mode_chat},   {"tokenize", mode_tokenize}, {"info", mode_info},
             {"perplexity", mode_perplexity}, {"batch", mode_batch}, {"bench", mode_bench}};
enum { N_MODES = sizeof modes / sizeof *modes };

static void print_help(void) {
    printf("run %s: inference of Llama-family models\n\n", RUN_VERSION);
    printf("usage: run MODEL [options], as in: run model.gguf -i \"Once upon a time\" -n 100\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &options[i];
        char letter[4] = "   ", left[64];
        if (o->group) printf("%s:\n", o->group);
        if (o->letter) snprintf(letter, sizeof letter, "-%c,", o->letter);
        snprintf(left, sizeof left, "%s --%s %s", letter, o->name, o->argument ? o->argument : "");
        printf("  %-26s %s", left, o->help);
        if (o->initial) printf(" (%s)", o->initial);
        printf("\n");
    }
    printf("Without -i and -f, redirected standard input is the prompt. Text goes to standard output, all else\n"
           "to standard error. Exit code: 0 done, 1 bad data or failure, 2 bad usage, 130 after Ctrl-C.\n");
}

// A text for troff: minus signs are minus signs, and no line begins with a command.
static void print_troff(const char *s) {
    if (*s == '.' || *s == '\'') printf("\\&");
    for (; *s; s++) {
        if (*s == '-') printf("\\-");
        else if (*s == '\\') printf("\\e");
        else putchar(*s);
    }
}

// The manual page, from the same table as the help. Ref: man(7).
static void print_man(void) {
    printf(".TH RUN 1 \"\" \"run %s\"\n.SH NAME\nrun \\- inference of Llama\\-family language models\n", RUN_VERSION);
    printf(".SH SYNOPSIS\n.B run\n.I MODEL\n.RI [ options ]\n.SH DESCRIPTION\n");
    printf("Runs the model in a checkpoint (GGUF, flat, or of llama2.c) on the processor: writes on from a prompt, or\n"
           "chats. Text goes to standard output, everything else to standard error. Without\n.B \\-i\nand\n.B \\-f\n"
           "redirected standard input is the prompt.\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &options[i];
        if (o->group) printf(".SH %s\n", o->group);
        printf(".TP\n.B ");
        if (o->letter) printf("\\-%c, ", o->letter);
        printf("\\-\\-");
        print_troff(o->name);
        if (o->argument) printf(" %s", o->argument);
        printf("\n");
        print_troff(o->help);
        if (o->initial) printf(" (%s)", o->initial);
        printf("\n");
    }
    printf(".SH EXIT STATUS\n0 done, 1 bad data or failure, 2 bad usage, 130 after Ctrl\\-C.\n");
}

// The number of single-character edits that turn a into b (Levenshtein), for texts below 32 characters.
static int edit_distance(const char *a, const char *b) {
    size_t m = strlen(a), n = strlen(b);
    int row[32];
    if (m > 31 || n > 31) return 99;
    for (size_t j = 0; j <= n; j++) row[j] = (int)j;
    for (size_t i = 1; i <= m; i++) {
        int diagonal = row[0];
        row[0] = (int)i;
        for (size_t j = 1; j <= n; j++) {
            int substitute = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            row[j] = min_int(substitute, 1 + min_int(row[j], row[j - 1]));
        }
    }
    return row[n];
}

static noreturn void unknown_option(const char *argument, const char *name) {
    int nearest = 0;
    for (int i = 1; i < N_OPTIONS; i++)
        if (edit_distance(name, options[i].name) < edit_distance(name, options[nearest].name)) nearest = i;
    if (strlen(name) > 1 && edit_distance(name, options[nearest].name) <= max_int(2, (int)strlen(name) / 3))
        die_usage("unknown option %s, did you mean --%s?", argument, options[nearest].name);
    die_usage("unknown option %s (run -h lists them)", argument);
}

// Put the value of an option where it belongs. Numbers must be numbers from end to end, and in range.
static void option_set(Options *o, const Option *option, const char *value) {
    char *field = (char *)o + option->offset, *end = NULL;
    errno = 0;
    bool number = isdigit((unsigned char)*value) || (strchr("-+.", *value) && *value);
    switch (option->kind) {
    case FLAG: *(bool *)field = true; return;
    case TEXT: *(const char **)field = value; return;
    case LIST:
        if (!*value) die_usage("--%s: expected a text, got an empty one", option->name);
        o->stops[o->n_stops++] = value;
        return;
    case REAL: {
        double x = strtod(value, &end);
        if (!number || *end || !isfinite(x) || strpbrk(value, "xX") || x < option->min || x > option->max)
            die_usage("--%s: expected a number from %g to %g, got '%s'", option->name, option->min, option->max, value);
        *(double *)field = x;
        return;
    }
    case INTEGER: {
        long long n = strtoll(value, &end, 10);
        if (!number || *end || errno || (double)n < option->min || (double)n > option->max)
            die_usage("--%s: expected a whole number from %.0f to %.0f, got '%s'", option->name, option->min,
                      option->max, value);
        *(int *)field = (int)n;
        return;
    }
    case SEED: {
        unsigned long long n = strtoull(value, &end, 10);
        if (!isdigit((unsigned char)*value) || *end || errno)
            die_usage("--%s: expected a whole number from 0 to 2^64 - 1, got '%s'", option->name, value);
        *(uint64_t *)field = n;
        o->seed_given = true;
        return;
    }
    }
}

// The option that argument names, `--name`, `--name=value`, `-x` or `-xvalue`. *value: the value in it, or NULL.
static const Option *option_find(const char *argument, const char **value) {
    bool is_long = argument[1] == '-';
    const char *name = argument + (is_long ? 2 : 1), *equals = is_long ? strchr(name, '=') : NULL;
    size_t len = equals ? (size_t)(equals - name) : strlen(name);
    for (int i = 0; i < N_OPTIONS && !is_long; i++) // -top-p is a slip, not -t with the value op-p
        if (!strcmp(name, options[i].name))
            die_usage("unknown option %s, did you mean --%s?", argument, options[i].name);
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &options[i];
        if (is_long && strlen(o->name) == len && !memcmp(o->name, name, len)) {
            *value = equals ? equals + 1 : NULL;
            return o;
        }
        if (!is_long && o->letter && o->letter == name[0]) {
            *value = name[1] ? name + 1 : NULL;
            return o;
        }
    }
    if (!is_long && strlen(name) == 1) unknown_option(argument, name);
    char bare[32];
    snprintf(bare, sizeof bare, "%.*s", (int)min_int((int)min_int(INT_MAX, (int)len), 31), name);
    unknown_option(argument, bare);
}

static Options parse_options(int argc, char **argv) {
    Options o = {.n_tokens = -1, .logprobs = -1};
    o.stops = alloc((size_t)argc + 1, sizeof *o.stops, "options");
    for (int i = 0; i < N_OPTIONS; i++)
        if (options[i].initial) option_set(&o, &options[i], options[i].initial);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] != '-' || !argv[i][1]) {
            if (o.checkpoint)
                die_usage("expected one checkpoint, got '%s' and '%s' (a prompt goes behind -i)", o.checkpoint,
                          argv[i]);
            o.checkpoint = argv[i];
            continue;
        }
        const char *value = NULL;
        const Option *option = option_find(argv[i], &value);
        if (option->kind == FLAG && value) die_usage("--%s: expected no value, got '%s'", option->name, value);
        if (option->kind != FLAG && !value) {
            if (i + 1 >= argc) die_usage("--%s: expected %s behind it, got nothing", option->name, option->argument);
            value = argv[++i];
        }
        option_set(&o, option, value ? value : "");
    }
    return o;
}

#ifdef RUN_LIBRARY
#define main lib_main // the door below is the way in
#endif

// A value that is one of three words, or of two.
static void check_word(const char *option, const char *value, const char *a, const char *b, const char *c) {
    if (!value || !strcmp(value, a) || !strcmp(value, b) || (c && !strcmp(value, c))) return;
    die_usage("--%s: expected %s%s%s or %s, got '%s'", option, a, c ? ", " : "", c ? b : "", c ? c : b, value);
}

static void check_options(const Options *o) {
    check_word("kv", o->kv, "f32", "f16", "q8");
    check_word("on-full", o->on_full, "stop", "slide", NULL);
    check_word("rope-scaling", o->rope_scaling, "linear", "ntk", "yarn");
    if (o->template) template_by_name(o->template);
    if (o->think && o->no_think) die_usage("--think and --no-think: expected one of the two, got both");
    if (o->prompt && o->file) die_usage("--prompt and --file: expected one of the two, got both");
    if (o->draft && o->lookup) die_usage("--draft and --lookup: expected one of the two, got both");
    if ((o->output || o->resume || o->unordered) && strcmp(o->mode, "batch"))
        die_usage("--output, --resume and --unordered: are for -m batch, got -m %s", o->mode);
    if (o->echo && !strcmp(o->mode, "chat")) die_usage("--echo: is for generate --json and batch");
    if (o->logprobs >= 0 && !o->json && strcmp(o->mode, "batch"))
        die_usage("--logprobs: expected --json with it, where they can be printed");
    if (o->rope_factor && !o->rope_scaling) die_usage("--rope-factor: expected --rope-scaling with it");
    if (o->rope_scaling && !o->rope_factor) die_usage("--rope-scaling: expected --rope-factor with it");
}

int main(int argc, char **argv) {
    Options o = parse_options(argc, argv);
    check_options(&o);
    int status = -1;
    if (o.help || o.man || o.version) {
        if (o.help) print_help();
        else if (o.man) print_man();
        else printf("run %s\n", RUN_VERSION);
        write_out("", 0);
        status = 0;
    }
    for (int i = 0; i < N_MODES && status < 0; i++)
        if (!strcmp(o.mode, modes[i].name)) status = modes[i].run(&o);
    if (status < 0)
        die_usage("--mode: expected generate, chat, tokenize, info, perplexity, batch or bench, got '%s'", o.mode);
    free(o.stops);
    return status;
}

#ifdef RUN_LIBRARY
// ---------------------------------------------------------------------------------------------------------------------
// The library door: with -DRUN_LIBRARY this file becomes a shared library without main, for tests and fuzzers.

#define API __attribute__((visibility("default")))

API void *lib_model(const char *path, int n_threads) {
    Checkpoint *checkpoint = checkpoint_open(path);
    Model *m = model_load(checkpoint, n_threads);
    checkpoint_close(checkpoint);
    return m;
}

API void lib_model_free(void *model) {
    model_free(model);
}

API int lib_vocab_size(const void *model) {
    return ((const Model *)model)->config.vocab_size;
}

API void *lib_session(const void *model, int n_ctx, int n_seqs, int max_rows, int n_threads) {
    return session_open(model, F32, n_ctx, n_seqs, max_rows, max_rows, n_threads);
}

// --rope-scaling: 1 linear, 2 yarn, 3 ntk; and --rope-factor
API void lib_rope_stretch(void *model, int scaling, double factor) {
    rope_stretch(model, (RopeScaling)scaling, factor);
}

// With a key/value cache of another type: 0 f32, 1 f16, 3 int8.
API void *lib_session_kv(const void *model, int kv_type, int n_ctx, int n_seqs, int max_rows, int n_threads) {
    return session_open(model, (Type)kv_type, n_ctx, n_seqs, max_rows, max_rows, n_threads);
}

API void lib_session_free(void *session) {
    session_free(session);
}

// logits: [rows that want them, vocab_size]
API void lib_forward(void *session, int n, const int *token, const int *pos, const int *seq, const uint8_t *want,
                     float *logits) {
    Session *s = session;
    Row *rows = alloc((size_t)n, sizeof *rows, "rows");
    for (int r = 0; r < n; r++) rows[r] = (Row){token[r], pos[r], seq[r], want[r]};
    forward(s, rows, n);
    size_t vocab = (size_t)s->model->config.vocab_size;
    for (size_t i = 0; i < (size_t)s->n_wanted; i++)
        memcpy(logits + i * vocab, s->logits + i * s->vocab_stride, vocab * sizeof *logits);
    free(rows);
}

API void *lib_tokenizer(const char *path) {
    Checkpoint *checkpoint = checkpoint_open(path);
    Tokenizer *t = tokenizer_load(checkpoint);
    checkpoint_close(checkpoint);
    return t;
}

API void lib_tokenizer_free(void *tokenizer) {
    tokenizer_free(tokenizer);
}

API int lib_encode(const void *tokenizer, const char *text, int len, int bos, int *out) {
    const Tokenizer *t = tokenizer;
    Ids ids = {0};
    if (bos) ids_append(&ids, t->bos);
    tokenizer_encode(t, text, (size_t)len, false, &ids);
    if (ids.len) memcpy(out, ids.id, (size_t)ids.len * sizeof *out);
    free(ids.id);
    return ids.len;
}

API int lib_decode(const void *tokenizer, const int *ids, int n, char *out) {
    Decoder decoder = {0};
    Text text = {0};
    for (int i = 0; i < n; i++) decoder_push(&decoder, tokenizer, ids[i], &text);
    decoder_flush(&decoder, &text);
    if (text.len) memcpy(out, text.data, text.len);
    free(text.data);
    return (int)text.len;
}

// A conversation of n messages as ids: roles 0 system, 1 user, 2 assistant. template: a name, or NULL for the file's own.
API int lib_chat(const void *tokenizer, const char *template, const char *source, int silent, int n, const int *roles,
                 char *const *texts, int *out) {
    const Tokenizer *t = tokenizer;
    Template chosen = template_choose(template, source ? source : t->chat_template, t->path);
    chosen.silent = silent;
    Message *messages = alloc((size_t)n + 1, sizeof *messages, "messages");
    for (int i = 0; i < n; i++) messages[i] = (Message){(Role)roles[i], texts[i], strlen(texts[i])};
    Ids ids = template_render(&chosen, t, messages, n);
    if (ids.len) memcpy(out, ids.id, (size_t)ids.len * sizeof *out);
    free(ids.id);
    free(messages);
    return ids.len;
}

API void lib_seed(uint64_t seed, uint64_t *state) {
    *state = rng_seed(seed);
}

API int lib_sample(const float *logits, int n, float temperature, float top_p, int top_k, float min_p,
                   float repeat_penalty, const int *history, int n_history, uint64_t *state) {
    Sampler *s = sampler_open((Sampling){temperature, top_p, min_p, repeat_penalty, top_k}, 1, n);
    s->rng = *state;
    int id = sampler_pick(s, logits, history, n_history);
    *state = s->rng;
    sampler_free(s);
    return id;
}

API int lib_default_threads(void) {
    return default_threads();
}

// A row of a GGUF format as floats, cols of them.
API void lib_unpack(uint32_t format, const uint8_t *row, int cols, float *out) {
    unpack_row(format_by_id(format), row, cols, out);
}

// y[n][rows] = x[n][cols] . w^T for a matrix as a file stores it, row by row: a format of GGUF by its id (F32 is 0),
// or, with scales (float [rows][cols / group]), int8. Where `back` is not NULL it gets the matrix out of its panels
// again.
API void lib_matmul(uint32_t format, int rows, int cols, int group, const uint8_t *w, const uint8_t *scales,
                    const float *x, int n, float *y, int n_threads, float *back) {
    Model m = {.n_threads = n_threads};
    Matrix matrix = matrix_load(&m, rows, cols, (Source){format_by_id(format), w, scales, group, 0});
    for (int r = 0; back && r < rows; r++) matrix_row(back + (size_t)r * (size_t)cols, &matrix, r);
    size_t y_stride = pad((size_t)rows, PANEL), count = (size_t)n;
    Activations in = activations_open(&m, n, cols);
    in.strip = n == 1 ? 1 : STRIP;
    float *out = alloc(count * y_stride, sizeof *out, "y");
    for (int r = 0; r < n; r++) {
        memcpy(in.f + (size_t)r * in.stride, x + (size_t)r * (size_t)cols, (size_t)cols * sizeof *x);
        prepare_row(&in, r, cols);
    }
#pragma omp parallel num_threads(n_threads)
    matmul(out, y_stride, &in, n, &matrix);
    for (size_t r = 0; r < count; r++) memcpy(y + r * (size_t)rows, out + r * y_stride, (size_t)rows * sizeof *y);
    activations_free(&in);
    free(out);
    matrix_free(&matrix);
}
#endif
