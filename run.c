/* run.c: inference of Llama-family language models on a CPU, in one file.

   A language model reads a list of tokens (numbered pieces of text) and gives every entry of its vocabulary a
   score, the logit, for being the next one. Drawing from these scores, appending the draw and asking again writes text.
   This file does that: it opens a checkpoint, turns a prompt into tokens, runs the transformer, samples, prints.

       ./run model.bin -i "Once upon a time"

   It needs libc, libm and, for several threads, OpenMP. `./run -h` lists the options.

   MAP. The sections stand bottom-up: each calls only those above it.

       §1  basics         errors, memory, files, the Reader through which every byte of a file passes
       §2  number formats how weights lie in memory: the panel; how activations become int8
       §3  checkpoint     Config, Matrix, Layer, Model, and the loaders that fill them
       §4  kernels        the matrix product: one shape of loop for every type and every instruction set
       §5  layers         rmsnorm, softmax, rope, swiglu: the small functions of the paper
       §6  session        what changes while running: key/value cache, activations, threads
       §7  forward        rows in, logits out: the transformer
       §8  tokenizer      text to token ids and back
       §9  sampler        logits to the next token
       §11 modes          generate, tokenize, info, perplexity
       §12 command line   one table of options drives parsing and help

   In a hurry? Read §3 (what a model is), §7 (what it computes) and §11 (the loop around it).

   LEGEND. The same names stand in the code, the tests and the documents:

       dim         width of the residual stream           n_heads     query heads
       hidden_dim  width inside the feed-forward          n_kv_heads  key/value heads, each shared by a group of query heads
       head_dim    width of one head                      n_ctx       positions that the cache of a sequence can hold
       q_dim       n_heads * head_dim                     kv_dim      n_kv_heads * head_dim
       loops: r row, l layer, h head, p panel, k column of a weight matrix, t position in a sequence, i element

   THE PROMISE. A logit does not depend on how it was computed: not on the number of threads, on how a prompt is cut
   into chunks, on what else is in the batch, or on the instruction set. Every sum has one fixed order, every
   multiply-add is fused exactly where it is written so, and the tests compare with ==. doc/numerics.md explains.

   REFERENCES. Vaswani et al. 2017, Attention is all you need. Zhang & Sennrich 2019, Root mean square layer
   normalization. Su et al. 2021, RoFormer (RoPE). Shazeer 2020, GLU variants improve transformer (SwiGLU). Ainslie et
   al. 2023, GQA. Touvron et al. 2023, Llama 2. Milakov & Gimelshein 2018, Online normalizer calculation for softmax.
   Holtzman et al. 2020, The curious case of neural text degeneration (top-p). Kudo & Richardson 2018, SentencePiece. */

#define _GNU_SOURCE // sched_getaffinity, MAP_ANONYMOUS

#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <stdnoreturn.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#ifdef _OPENMP
#include <omp.h>
#else
static int omp_get_thread_num(void) {
    return 0;
}
#endif

#define RUN_VERSION "0.1"

// ---------------------------------------------------------------------------------------------------------------------
// §1 Basics
//
// Errors, memory, files. Two rules hold everywhere: a failure is one line on stderr that names the file or option, what
// was expected and what was found, and ends the process (1: bad data or failure, 2: bad usage); and a number that comes
// from a file or the user is checked before it sizes or indexes anything. `assert`-like trust is for our own bugs only.

static noreturn void vdie(int status, const char *format, va_list args) {
    fflush(stdout);
    fputs("run: ", stderr);
    vfprintf(stderr, format, args);
    fputc('\n', stderr);
    exit(status);
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

// Zeroed memory for n elements. It starts on a 64-byte boundary, a cache line and the widest vector.
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

// n floats, copied.
static float *reader_f32_array(Reader *r, size_t n, const char *what) {
    const uint8_t *bytes = reader_take(r, product(n, sizeof(float), what), what);
    return memcpy(alloc(n, sizeof(float), what), bytes, n * sizeof(float));
}

// A binary heap: the entry with the highest score on top, the lowest index among equals. The tokenizer takes its merges
// from one, the sampler its candidates: both want the best few of many in order, without sorting the many.
typedef struct {
    float score;
    int index, extra;
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
// A 4-byte step of a row holds 1 float or 4 int8: as many columns as fit. Panel follows panel; the last one is padded
// with rows of zeros. The scales of an int8 matrix lie in an array of their own, [panel][group][16].
//
// INT8. A group of neighbouring weights w shares a scale s: w = s * q with q an integer in -127..127. The products
// q_w * q_x of two such groups are summed exactly in integers, and only the sum meets the two scales. The activations
// are quantised on the fly, in blocks of 32 columns (quantize_row).

typedef enum { F32, F16, BF16, I8, I4 } Type; // of a matrix; F16, BF16 and I4 are reserved

enum {
    PANEL = 16, // rows in a panel
    BLOCK = 32, // columns that share a scale in a row of quantised activations
};

// Row-major int8 or float bytes -> one panel. `rows` is how many of the 16 exist; the rest stay zero. src: [rows, row_bytes]
static void pack_panel(uint8_t *panel, const uint8_t *src, int rows, size_t row_bytes) {
    for (size_t step = 0; step < row_bytes / 4; step++)
        for (int r = 0; r < rows; r++)
            memcpy(panel + (step * PANEL + (size_t)r) * 4, src + (size_t)r * row_bytes + step * 4, 4);
}

// Scales of 16 rows -> [group][16]. src: float [rows, groups], at any alignment.
static void pack_scales(float *panel, const uint8_t *src, int rows, size_t groups) {
    for (int r = 0; r < rows; r++)
        for (size_t g = 0; g < groups; g++)
            memcpy(&panel[g * PANEL + (size_t)r], src + ((size_t)r * groups + g) * 4, 4);
}

// Rows of activations, ready to be multiplied: as floats, and as int8 where the model has int8 matrices.
typedef struct {
    size_t stride; // elements from one row to the next, a multiple of BLOCK; room for whole blocks
    float *f;      // [n_rows, stride]
    int8_t *q;     // [n_rows, stride]          f = scale * q within a block
    float *scale;  // [n_rows, stride / BLOCK]
    int32_t *sum;  // [n_rows, stride / 16]     sums of q over 16 columns (§4 says what for)
} Activations;

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

// Quantise one row: in each block of 32, scale = max|f| / 127 and q = round(f / scale), ties to even. An all-zero block
// has scale 0 and zeros, not 0/0. A block with a NaN or an infinity gets the scale NaN, so that the error reaches the
// logits and is reported there.
static void quantize_row(const Activations *x, int row, int cols) {
    float *f = x->f + (size_t)row * x->stride;
    int8_t *q = x->q + (size_t)row * x->stride;
    float *scale = x->scale + (size_t)row * (x->stride / BLOCK);
    int32_t *sum = x->sum + (size_t)row * (x->stride / 16);
    for (size_t i = (size_t)cols; i < pad((size_t)cols, BLOCK); i++) f[i] = 0; // the last block may be short
    for (int b = 0; b * BLOCK < cols; b++, f += BLOCK, q += BLOCK, sum += 2) {
        uint32_t bits = 0; // without their sign, floats compare like the integers with the same bits, NaN highest
        for (int i = 0; i < BLOCK; i++) {
            uint32_t magnitude = bits_of_float(f[i]) & 0x7fffffff;
            bits = magnitude > bits ? magnitude : bits;
        }
        float largest = float_from_bits(bits);
        float inverse = 127.0f / largest;
        bool usable = isfinite(largest) && isfinite(inverse); // else zero, too small to divide by, or not a number
        scale[b] = usable ? largest / 127.0f : isfinite(largest) ? 0 : NAN;
        sum[0] = sum[1] = 0;
        for (int i = 0; i < BLOCK; i++) {
            // Adding and subtracting 1.5 * 2^23 leaves no room for a fraction: the addition rounds, to even.
            q[i] = usable ? (int8_t)((f[i] * inverse + 12582912.0f) - 12582912.0f) : 0;
            sum[i / 16] += q[i];
        }
    }
}

// ---------------------------------------------------------------------------------------------------------------------
// §3 Checkpoint
//
// What a model is: a Config of hyperparameters, and for every layer four matrices for attention, three for the
// feed-forward and two norms. A Model never changes after loading; everything that does is in the Session (§6).
//
// A loader turns a file into a Model. It reads the header, checks that the file is exactly as long as the header
// implies, and rearranges each matrix into panels on all threads. Nothing downstream knows which format it was.

// W: [rows, cols], as panels. y = W x is what every matrix does.
typedef struct {
    Type type;
    int rows, cols;
    int group;           // I8: columns that share a scale, a multiple of 16
    const void *panels;  // [ceil(rows / 16)][cols / columns per step][16 rows] of 4-byte steps
    const float *scales; // I8: [ceil(rows / 16)][cols / group][16]
} Matrix;

typedef struct {
    int dim, hidden_dim, n_layers, n_heads, n_kv_heads, head_dim, vocab_size;
    int n_ctx_train;    // positions the model was trained for
    int sliding_window; // a row sees this many positions, itself included; 0: all
    float norm_eps;
    double rope_base;
} Config;

typedef struct {
    const float *attn_norm, *ffn_norm;     // [dim]
    Matrix q, k, v, o;                     // [q_dim, dim], [kv_dim, dim], [kv_dim, dim], [dim, q_dim]
    const float *q_bias, *k_bias, *v_bias; // [q_dim], [kv_dim], [kv_dim], or NULL
    const float *q_norm, *k_norm;          // [head_dim], or NULL: rmsnorm of each head before RoPE
    Matrix gate, down, up;                 // [hidden_dim, dim], [dim, hidden_dim], [hidden_dim, dim]
} Layer;

typedef struct {
    Config config;
    const char *path, *format;
    Matrix embed, output;    // [vocab_size, dim] both; the same panels where they are tied
    Layer *layers;           // [n_layers]
    const float *final_norm; // [dim]
    double *rope_freqs;      // [head_dim / 2], radians per position
    bool tied;               // output is embed
    bool any_int8;           // some matrix wants quantised activations
    int n_threads;           // for loading
} Model;

static int q_dim(const Config *c) {
    return c->n_heads * c->head_dim;
}

static int kv_dim(const Config *c) {
    return c->n_kv_heads * c->head_dim;
}

static size_t matrix_panels(const Matrix *w) {
    return ((size_t)w->rows + PANEL - 1) / PANEL;
}

// Bytes from one panel to the next.
static size_t panel_bytes(const Matrix *w) {
    return (size_t)w->cols * PANEL * (w->type == F32 ? 4 : 1);
}

static size_t panel_scales(const Matrix *w) {
    return w->type == F32 ? 0 : (size_t)(w->cols / w->group) * PANEL;
}

static size_t matrix_bytes(const Matrix *w) {
    return matrix_panels(w) * (panel_bytes(w) + panel_scales(w) * sizeof(float));
}

// Row-major weights in the file -> panels. weights: [rows, cols] float or int8; scales: [rows, cols / group] or NULL.
static Matrix matrix_load(Model *m, Type type, int rows, int cols, int group, const uint8_t *weights,
                          const uint8_t *scales) {
    Matrix w = {type, rows, cols, group, NULL, NULL};
    uint8_t *panels = alloc_pages(matrix_panels(&w), panel_bytes(&w), "a weight matrix");
    float *panels_scales = scales ? alloc_pages(matrix_panels(&w), panel_scales(&w) * sizeof(float), "scales") : NULL;
    size_t row_bytes = panel_bytes(&w) / PANEL;
#pragma omp parallel for schedule(static) num_threads(m->n_threads)
    for (int first = 0; first < rows; first += PANEL) {
        size_t p = (size_t)first / PANEL;
        int n = min_int(PANEL, rows - first);
        pack_panel(panels + p * panel_bytes(&w), weights + (size_t)first * row_bytes, n, row_bytes);
        size_t groups = scales ? (size_t)(cols / group) : 0;
        if (scales) pack_scales(panels_scales + p * panel_scales(&w), scales + (size_t)first * groups * 4, n, groups);
    }
    w.panels = panels;
    w.scales = panels_scales;
    if (type == I8) m->any_int8 = true;
    return w;
}

static void matrix_free(Matrix *w) {
    free_pages((void *)w->panels, matrix_panels(w), panel_bytes(w));
    free_pages((void *)w->scales, matrix_panels(w), panel_scales(w) * sizeof(float));
}

// One row of a matrix as floats: the embedding of a token.
static void matrix_row(float *out, const Matrix *w, int row) {
    size_t p = (size_t)row / PANEL, lane = (size_t)row % PANEL;
    const uint8_t *panel = (const uint8_t *)w->panels + p * panel_bytes(w);
    for (int k = 0; k < w->cols; k++) {
        if (w->type == F32) {
            out[k] = ((const float *)panel)[(size_t)k * PANEL + lane];
        } else {
            int8_t q = ((const int8_t *)panel)[((size_t)(k / 4) * PANEL + lane) * 4 + (size_t)(k % 4)];
            out[k] = (float)q * w->scales[p * panel_scales(w) + (size_t)(k / w->group) * PANEL + lane];
        }
    }
}

// Refuse what no sane model has before anything is computed from it: after this, products of two of these fit an int.
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
}

// RoPE turns pair i of a head by pos * base^(-2i / head_dim) radians. Ref: Su et al. 2021, eq. 15.
static double *rope_frequencies(const Config *c) {
    double *freqs = alloc((size_t)c->head_dim / 2, sizeof *freqs, "RoPE frequencies");
    for (int i = 0; i < c->head_dim / 2; i++) freqs[i] = pow(c->rope_base, -2.0 * i / c->head_dim);
    return freqs;
}

// --- llama2.c checkpoints, versions 0, 1 and 2
//
//   version 0   7 int32 (below); float32 tensors. A negative vocab_size says that the classifier is separate. After the
//               final norm lie two tables of RoPE values that nobody reads.
//   version 1   "ak42" (uint32), 1, 7 int32, uint8 shared_classifier, zeros to byte 256; norms first, then matrices.
//   version 2   as version 1 with 2, and an int32 group_size after shared_classifier; norms float32, then for each
//               matrix its int8 values and after them one float32 scale for every group_size values.
//
//   the 7:      dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, context length

enum { LLAMA2C_MAGIC = 0x616b3432, LLAMA2C_HEADER = 256 };

typedef struct {
    int version, group_size;
    bool shared_classifier;
} Llama2c;

static Config llama2c_header(Reader *r, Llama2c *h) {
    *h = (Llama2c){0};
    if (r->size >= 4 && !memcmp(r->data, "24ka", 4)) { // 0x616b3432, lowest byte first
        reader_i32(r, "magic");
        h->version = reader_i32(r, "version");
        if (h->version < 1 || h->version > 2)
            die("%s: expected a llama2.c checkpoint of version 0, 1 or 2, got version %d", r->path, h->version);
    }
    Config c = {.norm_eps = 1e-5f, .rope_base = 10000};
    c.dim = reader_i32(r, "dim");
    c.hidden_dim = reader_i32(r, "hidden_dim");
    c.n_layers = reader_i32(r, "n_layers");
    c.n_heads = reader_i32(r, "n_heads");
    c.n_kv_heads = reader_i32(r, "n_kv_heads");
    c.vocab_size = reader_i32(r, "vocab_size");
    c.n_ctx_train = reader_i32(r, "context length");
    h->shared_classifier = c.vocab_size > 0;
    if (h->version == 0 && c.vocab_size < 0) c.vocab_size = c.vocab_size == INT_MIN ? 0 : -c.vocab_size;
    if (h->version >= 1) h->shared_classifier = *reader_take(r, 1, "shared_classifier");
    if (h->version == 2) {
        h->group_size = reader_i32(r, "group_size");
        if (h->group_size < 1) die("%s: header: expected a positive group_size, got %d", r->path, h->group_size);
    }
    if (h->version >= 1) reader_take(r, LLAMA2C_HEADER - r->pos, "header");
    c.head_dim = c.n_heads > 0 ? c.dim / c.n_heads : 0;
    config_check(&c, r->path, h->version ? "llama2.c checkpoint" : "llama2.c checkpoint, and no other known format");
    if (c.dim % c.n_heads)
        die("%s: header: expected dim to be a multiple of n_heads, got %d and %d", r->path, c.dim, c.n_heads);
    return c;
}

// The exact size of a checkpoint, from its header alone. Ints: the fields are bounded by config_check.
static size_t llama2c_size(const Config *c, const Llama2c *h) {
    size_t dim = (size_t)c->dim, layers = (size_t)c->n_layers, vocab = (size_t)c->vocab_size;
    size_t per_layer[] = {dim * dim,
                          (size_t)kv_dim(c) * dim,
                          (size_t)kv_dim(c) * dim,
                          dim * dim,
                          (size_t)c->hidden_dim * dim,
                          (size_t)c->hidden_dim * dim,
                          (size_t)c->hidden_dim * dim};
    size_t norms = (2 * layers + 1) * dim * 4;
    size_t bytes = (h->version == 0 ? 28 : LLAMA2C_HEADER) + norms;
    if (h->version == 0) bytes += (size_t)c->n_ctx_train * (size_t)(c->head_dim / 2) * 2 * 4;
    size_t group = (size_t)h->group_size;
    for (int i = 0; i < 9; i++) {
        size_t copies = i < 7 ? layers : i == 7 ? 1 : !h->shared_classifier;
        size_t n = i < 7 ? per_layer[i] : vocab * dim;
        bytes += copies * (h->version == 2 ? n + n / group * 4 : n * 4);
    }
    return bytes;
}

// The next matrix of the file. Groups of version 2 run on through the flat tensor: where they do not end with the rows,
// or are too small for a panel, the values are multiplied out and kept as floats. Right before fast.
static Matrix llama2c_matrix(Model *m, Reader *r, const Llama2c *h, int rows, int cols, const char *name) {
    size_t n = (size_t)rows * (size_t)cols;
    if (h->version < 2) return matrix_load(m, F32, rows, cols, 0, reader_take(r, n * 4, name), NULL);
    size_t group = (size_t)h->group_size;
    if (n % group)
        die("%s: tensor %s: its %zu values are not a multiple of the group size %zu", r->path, name, n, group);
    const uint8_t *q = reader_take(r, n, name), *scales = reader_take(r, n / group * 4, name);
    if ((size_t)cols % group == 0 && group % 16 == 0) return matrix_load(m, I8, rows, cols, (int)group, q, scales);
    float *values = alloc_pages(n, sizeof *values, name);
    for (size_t i = 0; i < n; i++) {
        float scale;
        memcpy(&scale, scales + i / group * 4, sizeof scale);
        values[i] = (float)(int8_t)q[i] * scale;
    }
    Matrix w = matrix_load(m, F32, rows, cols, 0, (const uint8_t *)values, NULL);
    free_pages(values, n, sizeof *values);
    return w;
}

static void llama2c_load(Model *m, Reader *r) {
    Llama2c h;
    const Config c = m->config = llama2c_header(r, &h);
    static const char *const formats[] = {"llama2.c version 0 (float32)", "llama2.c version 1 (float32)",
                                          "llama2.c version 2 (int8)"};
    m->format = formats[h.version];
    size_t expected = llama2c_size(&c, &h);
    if (r->size != expected)
        die("%s: %s: expected %zu bytes from the header, got a file of %zu bytes", r->path, m->format, expected,
            r->size);
    m->tied = h.shared_classifier;
    m->layers = alloc((size_t)c.n_layers, sizeof *m->layers, "layers");
    // Tensors of one kind lie together, for all layers. Each kind is one turn of a loop; the order is the file's.
#define EACH_LAYER(field, value) \
    for (int l = 0; l < c.n_layers; l++) m->layers[l].field = (value)
#define NORM(name) reader_f32_array(r, (size_t)c.dim, name)
#define MATRIX(rows, cols, name) llama2c_matrix(m, r, &h, rows, cols, name)
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
}

// Name the formats that people try and this program does not read, each with the way out.
static void refuse_other_formats(const Mapping *file) {
    static const struct {
        size_t offset;
        const char *magic, *name;
    } others[] = {{0, "GGUF", "a GGUF file; this version of run reads llama2.c checkpoints"},
                  {0, "PK\3\4", "a PyTorch or zip file; export it to a .bin first"},
                  {0, "tjgg", "an old GGML file; convert it to GGUF first"},
                  {0, "lmgg", "an old GGML file; convert it to GGUF first"},
                  {8, "{\"", "a safetensors file; export it to a .bin first"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        size_t n = strlen(others[i].magic);
        if (file->size >= others[i].offset + n && !memcmp(file->data + others[i].offset, others[i].magic, n))
            die("%s: this is %s", file->path, others[i].name);
    }
}

static Model *model_load(const char *path, int n_threads) {
    Mapping file = map_file(path);
    refuse_other_formats(&file);
    Model *m = alloc(1, sizeof *m, "model");
    m->path = path;
    m->n_threads = n_threads;
    Reader r = {path, file.data, file.size, 0};
    llama2c_load(m, &r);
    m->rope_freqs = rope_frequencies(&m->config);
    unmap_file(&file);
    return m;
}

// Everything that a decoded token has to read: all matrices but the embedding, of which it reads one row.
static size_t model_bytes_per_token(const Model *m) {
    size_t bytes = matrix_bytes(&m->output);
    for (int l = 0; l < m->config.n_layers; l++) {
        const Layer *a = &m->layers[l];
        const Matrix *all[] = {&a->q, &a->k, &a->v, &a->o, &a->gate, &a->down, &a->up};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) bytes += matrix_bytes(all[i]);
    }
    return bytes;
}

static void model_free(Model *m) {
    for (int l = 0; l < m->config.n_layers; l++) {
        Layer *a = &m->layers[l];
        Matrix *all[] = {&a->q, &a->k, &a->v, &a->o, &a->gate, &a->down, &a->up};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) matrix_free(all[i]);
        free((void *)a->attn_norm);
        free((void *)a->ffn_norm);
    }
    if (!m->tied) matrix_free(&m->output);
    matrix_free(&m->embed);
    free((void *)m->final_norm);
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
// broadcasts 4 bytes of each x row to all lanes, and multiplies and adds:
//
//                         16 outputs     16 outputs
//        x row 0   k ->  [ acc 0,0    ] [ acc 0,1    ]      acc[r][p] += panel p, step k * x[r][k]
//        x row 1   k ->  [ acc 1,0    ] [ acc 1,1    ]
//        ...                                                each weight that is loaded meets every row,
//        x row 7   k ->  [ acc 7,0    ] [ acc 7,1    ]      each broadcast meets every panel
//
// For every output the order of additions is the order of k, one fused multiply-add per step, whatever the tile's size:
// so the result is the same for 1 row or 500, and on every instruction set.
//
// A Floats or Ints is a vector register: 16 lanes in plain C, 16 or 8 where an instruction set takes over. This is the
// only place of the file with code for a particular processor.

// a * b + c, rounded once. On x86 without FMA it is rounded twice: the `portable` build promises less (doc/numerics.md).
static inline float fma1(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
    return fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#if defined(__AVX512F__) && defined(__AVX512VNNI__) && !defined(RUN_PLAIN)
#include <immintrin.h>
enum { LANES = 16, TILE_PANELS = 2, TILE_ROWS = 8 };
// vpdpbusd multiplies unsigned by signed bytes. XOR 0x80 turns a weight w into w + 128, so that the dot product comes
// out too large by 128 * sum(x): it starts at minus that.
enum { DOT_OFFSET = 128 };
typedef __m512 Floats;
typedef __m512i Ints;
#define floats_load(p) _mm512_loadu_ps(p)
#define floats_store(p, v) _mm512_storeu_ps(p, v)
#define floats_set(x) _mm512_set1_ps(x)
#define floats_mul(a, b) _mm512_mul_ps(a, b)
#define floats_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define floats_from_ints(v) _mm512_cvtepi32_ps(v)
#define ints_set(x) _mm512_set1_epi32(x)
#define ints_load_weights(p) _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_set1_epi8((char)0x80))
#define ints_dot4(acc, w, x) _mm512_dpbusd_epi32(acc, w, x)

#elif defined(__AVX2__) && defined(__FMA__) && !defined(RUN_PLAIN)
#include <immintrin.h>
enum { LANES = 8, TILE_PANELS = 1, TILE_ROWS = 6, DOT_OFFSET = 0 };
typedef __m256 Floats;
typedef __m256i Ints;
#define floats_load(p) _mm256_loadu_ps(p)
#define floats_store(p, v) _mm256_storeu_ps(p, v)
#define floats_set(x) _mm256_set1_ps(x)
#define floats_mul(a, b) _mm256_mul_ps(a, b)
#define floats_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define floats_from_ints(v) _mm256_cvtepi32_ps(v)
#define ints_set(x) _mm256_set1_epi32(x)
#define ints_load_weights(p) _mm256_loadu_si256((const __m256i *)(p))
// maddubs, too, wants unsigned times signed: |w| and x with the sign of w. 2 * 128 * 127 fits its 16 bits.
static inline Ints ints_dot4(Ints acc, Ints w, Ints x) {
    __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}

#else // plain C: says what the instructions above do, and what every one of them must equal
enum { LANES = 16, TILE_PANELS = 1, TILE_ROWS = 4, DOT_OFFSET = 0 };
typedef struct {
    float lane[LANES];
} Floats;
typedef struct {
    int32_t lane[LANES];
} Ints;
#define EACH_LANE for (int i = 0; i < LANES; i++)
static inline Floats floats_load(const float *p) {
    Floats v;
    EACH_LANE v.lane[i] = p[i];
    return v;
}
static inline void floats_store(float *p, Floats v) {
    EACH_LANE p[i] = v.lane[i];
}
static inline Floats floats_set(float x) {
    Floats v;
    EACH_LANE v.lane[i] = x;
    return v;
}
static inline Floats floats_mul(Floats a, Floats b) {
    EACH_LANE a.lane[i] *= b.lane[i];
    return a;
}
static inline Floats floats_fma(Floats a, Floats b, Floats c) {
    EACH_LANE c.lane[i] = fma1(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}
static inline Floats floats_from_ints(Ints v) {
    Floats f;
    EACH_LANE f.lane[i] = (float)v.lane[i];
    return f;
}
static inline Ints ints_set(int32_t x) {
    Ints v;
    EACH_LANE v.lane[i] = x;
    return v;
}
static inline Ints ints_load_weights(const void *p) {
    Ints v;
    memcpy(&v, p, sizeof v);
    return v;
}
// Each lane holds 4 int8 of w and of x: acc += their dot product.
static inline Ints ints_dot4(Ints acc, Ints w, Ints x) {
    const int8_t *a = (const int8_t *)&w, *b = (const int8_t *)&x;
    EACH_LANE for (int j = 0; j < 4; j++) acc.lane[i] += a[4 * i + j] * b[4 * i + j];
    return acc;
}
#endif

enum { PANEL_VECTORS = PANEL / LANES, TILE_VECTORS = TILE_PANELS * PANEL_VECTORS };

// Where vector v of a tile starts, relative to the tile's first panel. `panel`: elements from one panel to the next.
static inline size_t vector_offset(int v, size_t panel) {
    return (size_t)(v / PANEL_VECTORS) * panel + (size_t)(v % PANEL_VECTORS) * LANES;
}

#define ALWAYS_INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")

// One tile of float weights: y[r] = W x[r] for n_rows rows and n_panels panels, both constants where it is inlined, so
// that acc is registers. w: first panel, `step` floats from one k to the next, `panel` floats from panel to panel.
ALWAYS_INLINE void tile_f32(int n_panels, int n_rows, const float *w, size_t step, size_t panel, int cols,
                            const float *x, size_t x_stride, float *y, size_t y_stride) {
    const int n_vectors = n_panels * PANEL_VECTORS;
    Floats acc[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vectors; v++) acc[r][v] = floats_set(0);
    for (int k = 0; k < cols; k++, w += step) {
        Floats weights[TILE_VECTORS];
        UNROLL for (int v = 0; v < n_vectors; v++) weights[v] = floats_load(w + vector_offset(v, panel));
        UNROLL for (int r = 0; r < n_rows; r++) {
            Floats xk = floats_set(x[(size_t)r * x_stride + (size_t)k]);
            UNROLL for (int v = 0; v < n_vectors; v++) acc[r][v] = floats_fma(weights[v], xk, acc[r][v]);
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vectors; v++)
        floats_store(y + (size_t)r * y_stride + vector_offset(v, PANEL), acc[r][v]);
}

// One tile of int8 weights. `block` columns (16 or 32) are summed in integers, then meet the scales of both sides:
// y = sum over blocks of (sum q_w * q_x) * (scale_w * scale_x).
ALWAYS_INLINE void tile_int8(int n_panels, int n_rows, int block, const Matrix *w, size_t first_panel,
                             const Activations *x, int row, float *y, size_t y_stride) {
    const int n_vectors = n_panels * PANEL_VECTORS;
    const size_t panel = panel_bytes(w) / 4, scales_panel = panel_scales(w); // in 4-byte steps; in scales
    const int32_t *steps = (const int32_t *)w->panels + first_panel * panel;
    const float *scales = w->scales + first_panel * scales_panel;
    Floats acc[TILE_ROWS][TILE_VECTORS];
    UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vectors; v++) acc[r][v] = floats_set(0);
    for (int group = 0; group < w->cols; group += w->group, scales += PANEL) {
        for (int k = group; k < group + w->group; k += block) {
            Ints dot[TILE_ROWS][TILE_VECTORS];
            UNROLL for (int r = 0; r < n_rows; r++) {
                const int32_t *sum = x->sum + ((size_t)(row + r) * x->stride + (size_t)k) / 16;
                Ints start = ints_set(-DOT_OFFSET * (block == 32 ? sum[0] + sum[1] : sum[0]));
                UNROLL for (int v = 0; v < n_vectors; v++) dot[r][v] = start;
            }
            UNROLL for (int i = 0; i < block / 4; i++, steps += PANEL) {
                Ints weights[TILE_VECTORS];
                UNROLL for (int v = 0; v < n_vectors; v++) weights[v] =
                    ints_load_weights(steps + vector_offset(v, panel));
                UNROLL for (int r = 0; r < n_rows; r++) {
                    int32_t four;
                    memcpy(&four, x->q + (size_t)(row + r) * x->stride + (size_t)(k + 4 * i), sizeof four);
                    Ints xk = ints_set(four);
                    UNROLL for (int v = 0; v < n_vectors; v++) dot[r][v] = ints_dot4(dot[r][v], weights[v], xk);
                }
            }
            UNROLL for (int v = 0; v < n_vectors; v++) {
                Floats scale_w = floats_load(scales + vector_offset(v, scales_panel));
                UNROLL for (int r = 0; r < n_rows; r++) {
                    Floats scale_x = floats_set(x->scale[((size_t)(row + r) * x->stride + (size_t)k) / BLOCK]);
                    acc[r][v] = floats_fma(floats_from_ints(dot[r][v]), floats_mul(scale_w, scale_x), acc[r][v]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < n_rows; r++) UNROLL for (int v = 0; v < n_vectors; v++)
        floats_store(y + (size_t)r * y_stride + vector_offset(v, PANEL), acc[r][v]);
}

// Runs call(n_panels, n_rows) with both as constants: the compiler makes one copy of the tile for each.
#define ROW_CASE(n, panels, call) \
    case n: \
        if (n <= TILE_ROWS) call(panels, n); \
        break;
#define ROW_CASES(rows, panels, call) \
    switch (rows) { \
        ROW_CASE(1, panels, call) \
        ROW_CASE(2, panels, call) \
        ROW_CASE(3, panels, call) \
        ROW_CASE(4, panels, call) \
        ROW_CASE(5, panels, call) \
        ROW_CASE(6, panels, call) \
        ROW_CASE(7, panels, call) \
        ROW_CASE(8, panels, call) \
    }
#define WITH_CONSTANTS(panels, rows, call) \
    if ((panels) == TILE_PANELS) { \
        ROW_CASES(rows, TILE_PANELS, call) \
    } else { \
        ROW_CASES(rows, 1, call) \
    }

// y[r] = W x[r] for n_rows rows and n_panels panels of float weights, one thread. The strides are in floats. Rows of y
// have room for whole panels. Attention uses it too: a cache of keys is a matrix, and so is a cache of values.
static void multiply_f32(int n_panels, int n_rows, const float *w, size_t step, size_t panel, int cols, const float *x,
                         size_t x_stride, float *y, size_t y_stride) {
    for (int p = 0; p < n_panels; p += TILE_PANELS)
        for (int r = 0; r < n_rows; r += TILE_ROWS) {
#define CALL(panels, rows) \
    tile_f32(panels, rows, w + (size_t)p * panel, step, panel, cols, x + (size_t)r * x_stride, x_stride, \
             y + (size_t)r * y_stride + (size_t)p * PANEL, y_stride)
            WITH_CONSTANTS(min_int(TILE_PANELS, n_panels - p), min_int(TILE_ROWS, n_rows - r), CALL)
#undef CALL
        }
}

static void multiply_int8(int n_panels, int n_rows, const Matrix *w, size_t first_panel, const Activations *x, float *y,
                          size_t y_stride) {
    for (int r = 0; r < n_rows; r += TILE_ROWS) {
#define CALL_32(panels, rows) tile_int8(panels, rows, 32, w, first_panel, x, r, y + (size_t)r * y_stride, y_stride)
#define CALL_16(panels, rows) tile_int8(panels, rows, 16, w, first_panel, x, r, y + (size_t)r * y_stride, y_stride)
        if (w->group % 32 == 0) {
            WITH_CONSTANTS(n_panels, min_int(TILE_ROWS, n_rows - r), CALL_32)
        } else {
            WITH_CONSTANTS(n_panels, min_int(TILE_ROWS, n_rows - r), CALL_16)
        }
#undef CALL_32
#undef CALL_16
    }
}

// y[r] = W x[r], r < n_rows. y: [n_rows, y_stride], y_stride >= rows rounded up to whole panels. Every thread of a
// parallel region calls it; they share the panels, and all leave when y is complete. Neighbouring panels go to one
// thread: long runs of memory are what the memory system likes.
static void matmul(float *y, size_t y_stride, const Activations *x, int n_rows, const Matrix *w) {
    int n_panels = (int)matrix_panels(w);
#pragma omp for schedule(static)
    for (int p = 0; p < n_panels; p += TILE_PANELS) {
        int n = min_int(TILE_PANELS, n_panels - p);
        float *out = y + (size_t)p * PANEL;
        if (w->type == F32) {
            size_t panel = panel_bytes(w) / sizeof(float);
            const float *first = (const float *)w->panels + (size_t)p * panel;
            multiply_f32(n, n_rows, first, PANEL, panel, w->cols, x->f, x->stride, out, y_stride);
        } else {
            multiply_int8(n, n_rows, w, (size_t)p, x, out, y_stride);
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

// e^x, relative error below 1e-7. Our own, because libraries differ in the last bit and do not vectorise. Below -87 the
// result is 0, above 88 it stays at e^88. With n = round(x / ln 2) and r = x - n ln 2, |r| <= ln 2 / 2:
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

// cos and sin of the angle of every pair at a position: turns[2i], turns[2i + 1]. In double: at position 100,000 a float
// angle would be off by 1/100 of a radian.
static void rope_turns(float *turns, const double *freqs, int head_dim, int pos) {
    for (int i = 0; i < head_dim / 2; i++) {
        turns[2 * i] = (float)cos(pos * freqs[i]);
        turns[2 * i + 1] = (float)sin(pos * freqs[i]);
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
    size_t cache_positions;                                              // n_ctx in whole panels
    int span_rows;                                                       // rows in a span, at most
    size_t dim_stride, q_stride, kv_stride, hidden_stride, vocab_stride; // widths in whole panels
    size_t v_stride;                                                     // head_dim in whole panels
    float *x;         // [max_rows, dim_stride]      the residual stream
    Activations in;   // [max_rows, widest]          what the next matrices multiply
    float *q;         // [max_rows, q_stride]
    float *k, *v;     // [max_rows, kv_stride]
    float *branch;    // [max_rows, dim_stride]      what attention or feed-forward adds to x
    float *gate, *up; // [max_rows, hidden_stride]
    float *turns;     // [max_rows, head_dim]        RoPE: cos and sin at each row's position
    float *logits;    // [max_logits, vocab_stride]
    int *wanted;      // [max_logits] the rows they belong to
    Span *spans;      // [max_rows]
    int n_wanted, n_spans;
    Scratch *scratch; // [n_threads]
    float *cache;     // [n_seqs, n_layers, n_kv_heads, keys then values]
} Session;

// Floats of keys and values of one kv head.
static size_t cache_run(const Session *s) {
    return product(s->cache_positions, (size_t)s->model->config.head_dim + s->v_stride, "key/value cache");
}

static size_t cache_floats(const Session *s) {
    const Config *c = &s->model->config;
    size_t runs = product(product((size_t)s->n_seqs, (size_t)c->n_layers, "cache"), (size_t)c->n_kv_heads, "cache");
    return product(runs, cache_run(s), "key/value cache");
}

static float *cache_keys(const Session *s, int seq, int layer, int kv_head) {
    const Config *c = &s->model->config;
    size_t run = ((size_t)seq * (size_t)c->n_layers + (size_t)layer) * (size_t)c->n_kv_heads + (size_t)kv_head;
    return s->cache + run * cache_run(s);
}

static float *cache_values(const Session *s, int seq, int layer, int kv_head) {
    return cache_keys(s, seq, layer, kv_head) + s->cache_positions * (size_t)s->model->config.head_dim;
}

// Put the key and value of one kv head at a position. k, v: [head_dim]
static void cache_store(float *keys, float *values, size_t v_stride, int pos, const float *k, const float *v,
                        int head_dim) {
    float *panel = keys + (size_t)(pos / PANEL) * PANEL * (size_t)head_dim + pos % PANEL;
    for (int i = 0; i < head_dim; i++) panel[(size_t)i * PANEL] = k[i];
    memcpy(values + (size_t)pos * v_stride, v, (size_t)head_dim * sizeof *v);
}

// Room for n_seqs sequences of n_ctx positions, forward calls of up to max_rows rows of which max_logits want logits.
static Session *session_open(const Model *m, int n_ctx, int n_seqs, int max_rows, int max_logits, int n_threads) {
    const Config *c = &m->config;
    Session *s = alloc(1, sizeof *s, "session");
    *s =
        (Session){.model = m, .n_seqs = n_seqs, .max_rows = max_rows, .max_logits = max_logits, .n_threads = n_threads};
    s->n_ctx = n_ctx;
    s->cache_positions = pad((size_t)n_ctx, PANEL);
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
    size_t widest = pad((size_t)max_int(max_int(c->dim, c->hidden_dim), q_dim(c)), BLOCK);
    s->in = (Activations){.stride = widest, .f = alloc(n * widest, sizeof(float), "activations")};
    if (m->any_int8) {
        s->in.q = alloc(n * widest, 1, "activations");
        s->in.scale = alloc(n * widest / BLOCK, sizeof(float), "activations");
        s->in.sum = alloc(n * widest / 16, sizeof(int32_t), "activations");
    }
    s->logits = alloc(product((size_t)max_logits, s->vocab_stride, "logits"), sizeof(float), "logits");
    s->wanted = alloc((size_t)max_logits, sizeof *s->wanted, "session");
    s->spans = alloc(n, sizeof *s->spans, "session");
    s->scratch = alloc((size_t)n_threads, sizeof *s->scratch, "session");
    for (int i = 0; i < n_threads; i++) {
        size_t queries = (size_t)(s->span_rows * group);
        float *f =
            alloc(queries * ((size_t)c->head_dim + ATTENTION_BLOCK + 2 * s->v_stride + 3), sizeof *f, "attention");
        Scratch *t = &s->scratch[i];
        t->scores = f; // first, and a multiple of 16 floats each, so that the vectors lie on cache lines
        t->part = t->scores + queries * ATTENTION_BLOCK;
        t->out = t->part + queries * s->v_stride;
        t->q = t->out + queries * s->v_stride;
        t->max = t->q + queries * (size_t)c->head_dim;
        t->sum = t->max + queries;
        t->rescale = t->sum + queries;
    }
    s->cache = alloc_pages(cache_floats(s), sizeof(float), "key/value cache");
    return s;
}

static void session_free(Session *s) {
    void *all[] = {s->x,    s->q,    s->k,        s->v,      s->branch, s->gate,   s->up,   s->turns,
                   s->in.f, s->in.q, s->in.scale, s->in.sum, s->logits, s->wanted, s->spans};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) free(all[i]);
    for (int i = 0; i < s->n_threads; i++) free(s->scratch[i].scores);
    free(s->scratch);
    free_pages(s->cache, cache_floats(s), sizeof(float));
    free(s);
}

// --- how many threads: one for each physical core that this process may use. Two threads on one core share its
// arithmetic and only get in each other's way, and threads beyond a container's quota are stopped in mid-stride.

#ifdef __linux__
// The first number in a small file of the kernel's, or -1.
static long first_number(const char *path) {
    FILE *file = fopen(path, "r");
    long n = -1;
    if (file && fscanf(file, "%ld", &n) != 1) n = -1;
    if (file) fclose(file);
    return n;
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
    long quota, period;
    FILE *limit = fopen("/sys/fs/cgroup/cpu.max", "r"); // "200000 100000": two cores' worth of time; or "max 100000"
    if (limit && fscanf(limit, "%ld %ld", &quota, &period) == 2 && period > 0)
        cores = min_int(cores, max_int(1, (int)(quota / period)));
    if (limit) fclose(limit);
    return max_int(1, cores);
}
#else
static int default_threads(void) {
    return max_int(1, (int)sysconf(_SC_NPROCESSORS_ONLN));
}
#endif

// ---------------------------------------------------------------------------------------------------------------------
// §7 Forward
//
// The transformer: rows in, logits out. Decoding is a call with one row; reading a prompt, one with many rows of a
// sequence; a batch, one row of each sequence. Only attention looks at where and whose a row is. Each function below is
// called by all threads of one parallel region and splits its work with `omp for`, at whose end they meet.

// x = the embedding of each row's token; and what else depends only on the row.
static void embed(Session *s, const Row *rows, int n) {
    const Model *m = s->model;
#pragma omp for schedule(static)
    for (int r = 0; r < n; r++) {
        matrix_row(s->x + (size_t)r * s->dim_stride, &m->embed, rows[r].token);
        rope_turns(s->turns + (size_t)r * (size_t)m->config.head_dim, m->rope_freqs, m->config.head_dim, rows[r].pos);
    }
}

// in = rmsnorm(x) of each row
static void norm_rows(Session *s, const float *weight, int n) {
    const Config *c = &s->model->config;
#pragma omp for schedule(static)
    for (int r = 0; r < n; r++) {
        rmsnorm(s->in.f + (size_t)r * s->in.stride, s->x + (size_t)r * s->dim_stride, weight, c->dim, c->norm_eps);
        if (s->model->any_int8) quantize_row(&s->in, r, c->dim);
    }
}

// x += branch, the residual connection
static void add_branch(Session *s, int n) {
#pragma omp for schedule(static)
    for (int r = 0; r < n; r++)
        for (size_t i = 0; i < s->dim_stride; i++)
            s->x[(size_t)r * s->dim_stride + i] += s->branch[(size_t)r * s->dim_stride + i];
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
#pragma omp for schedule(static)
    for (int r = 0; r < n; r++) {
        const float *turns = s->turns + (size_t)r * (size_t)hd;
        float *q = s->q + (size_t)r * s->q_stride, *k = s->k + (size_t)r * s->kv_stride,
              *v = s->v + (size_t)r * s->kv_stride;
        for (int h = 0; h < c->n_heads; h++)
            finish_head(c, q + h * hd, a->q_bias ? a->q_bias + h * hd : NULL, a->q_norm, turns);
        for (int i = 0; a->v_bias && i < kv_dim(c); i++) v[i] += a->v_bias[i];
        for (int h = 0; h < c->n_kv_heads; h++) {
            finish_head(c, k + h * hd, a->k_bias ? a->k_bias + h * hd : NULL, a->k_norm, turns);
            cache_store(cache_keys(s, rows[r].seq, layer, h), cache_values(s, rows[r].seq, layer, h), s->v_stride,
                        rows[r].pos, k + h * hd, v + h * hd, hd);
        }
    }
}

// The online softmax of one query over one block of n scores (a multiple of 16), of which [from, to) are visible. Turns
// scores into weights e^(score - max); where the block raises the maximum, what was summed before shrinks by `rescale`.
// Ref: Milakov & Gimelshein 2018, alg. 3.
static void softmax_block(float *scores, int n, int from, int to, float *max, float *sum, float *rescale) {
    for (int t = 0; t < n; t++)
        if (t < from || t >= to) scores[t] = -INFINITY;
    float highest = *max;
    for (int t = from; t < to; t++) highest = scores[t] > highest ? scores[t] : highest;
    *rescale = from < to ? exp_f32(*max - highest) : 1;
    *sum = fma1(*sum, *rescale, exp_and_sum(scores, n, from < to ? highest : 0));
    *max = highest;
}

// Attention of the queries of one span that share a kv head:
//     out = softmax(q . k^T / sqrt(head_dim)) . v     over the positions that the query's row may see
// Ref: Vaswani et al. 2017, eq. 1; Ainslie et al. 2023 for the sharing. Blocks of positions in which no query of the span
// sees anything are skipped; a position that one query may not see gets weight 0 there, which changes nothing.
static void attend(const Session *s, Scratch *t, int layer, int kv_head, const Row *rows, Span span) {
    const Config *c = &s->model->config;
    int hd = c->head_dim, group = c->n_heads / c->n_kv_heads, n_queries = span.count * group;
    const Row *first = &rows[span.first];
    const float *keys = cache_keys(s, first->seq, layer, kv_head),
                *values = cache_values(s, first->seq, layer, kv_head);
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
        multiply_f32(padded / PANEL, n_queries, keys + (size_t)b * (size_t)hd, PANEL, (size_t)hd * PANEL, hd, t->q,
                     (size_t)hd, t->scores, ATTENTION_BLOCK);
        for (int i = 0; i < n_queries; i++) {
            int pos = first->pos + i / group, oldest = c->sliding_window ? pos - c->sliding_window + 1 : 0;
            int from = max_int(oldest - b, 0), to = min_int(pos + 1 - b, n);
            softmax_block(t->scores + (size_t)i * ATTENTION_BLOCK, padded, from, to, &t->max[i], &t->sum[i],
                          &t->rescale[i]);
        }
        multiply_f32((int)s->v_stride / PANEL, n_queries, values + (size_t)b * s->v_stride, s->v_stride, PANEL, n,
                     t->scores, ATTENTION_BLOCK, t->part, s->v_stride);
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

static void quantize_rows(Session *s, int n, int cols) {
    if (!s->model->any_int8) return;
#pragma omp for schedule(static)
    for (int r = 0; r < n; r++) quantize_row(&s->in, r, cols);
}

// x += Wo attention(Wq norm(x), Wk norm(x), Wv norm(x))
static void attention(Session *s, int layer, const Row *rows, int n) {
    const Layer *a = &s->model->layers[layer];
    norm_rows(s, a->attn_norm, n);
    matmul(s->q, s->q_stride, &s->in, n, &a->q);
    matmul(s->k, s->kv_stride, &s->in, n, &a->k);
    matmul(s->v, s->kv_stride, &s->in, n, &a->v);
    rotate_and_store(s, layer, rows, n);
#pragma omp for schedule(dynamic)
    for (int i = 0; i < s->n_spans * s->model->config.n_kv_heads; i++)
        attend(s, &s->scratch[omp_get_thread_num()], layer, i % s->model->config.n_kv_heads, rows,
               s->spans[i / s->model->config.n_kv_heads]);
    quantize_rows(s, n, q_dim(&s->model->config));
    matmul(s->branch, s->dim_stride, &s->in, n, &a->o);
    add_branch(s, n);
}

// x += Wdown (silu(Wgate norm(x)) * Wup norm(x))
static void feed_forward(Session *s, int layer, int n) {
    const Layer *a = &s->model->layers[layer];
    const Config *c = &s->model->config;
    norm_rows(s, a->ffn_norm, n);
    matmul(s->gate, s->hidden_stride, &s->in, n, &a->gate);
    matmul(s->up, s->hidden_stride, &s->in, n, &a->up);
#pragma omp for schedule(static)
    for (int r = 0; r < n; r++) {
        size_t at = (size_t)r * s->hidden_stride;
        swiglu(s->in.f + (size_t)r * s->in.stride, s->gate + at, s->up + at, c->hidden_dim);
        if (s->model->any_int8) quantize_row(&s->in, r, c->hidden_dim);
    }
    matmul(s->branch, s->dim_stride, &s->in, n, &a->down);
    add_branch(s, n);
}

// logits = Woutput norm(x), for the rows that want them, in their order
static void classify(Session *s) {
    const Model *m = s->model;
#pragma omp for schedule(static)
    for (int i = 0; i < s->n_wanted; i++) {
        rmsnorm(s->in.f + (size_t)i * s->in.stride, s->x + (size_t)s->wanted[i] * s->dim_stride, m->final_norm,
                m->config.dim, m->config.norm_eps);
        if (m->any_int8) quantize_row(&s->in, i, m->config.dim);
    }
    matmul(s->logits, s->vocab_stride, &s->in, s->n_wanted, &m->output);
}

// Which rows want logits, and which neighbours are one span: same sequence, ascending positions.
static void plan_rows(Session *s, const Row *rows, int n) {
    s->n_wanted = s->n_spans = 0;
    for (int r = 0; r < n; r++) {
        if (rows[r].want_logits) s->wanted[s->n_wanted++] = r;
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
// §8 Tokenizer
//
// A model reads token ids. The vocabulary lists the piece of text of each id; byte-pair encoding (BPE) cuts a text into
// pieces: it starts from single characters and merges, again and again, the neighbouring pair whose joined piece has
// the best score (leftmost among equals), until no pair joins to a piece. A character that is no piece falls back to its
// UTF-8 bytes, for each of which there is a piece <0x00> ... <0xFF>, so that any text can be written.
// Ref: Sennrich et al. 2016; Kudo & Richardson 2018.
//
// Rescanning the text for every merge takes time proportional to its square. Here the symbols form a linked list and the
// pairs that can merge wait in a heap: n log n.

typedef enum { NORMAL_PIECE, CONTROL_PIECE, BYTE_PIECE, UNKNOWN_PIECE } PieceType;

typedef struct {
    const char *text; // not terminated
    int len;
    float score;
    PieceType type;
} Piece;

enum { MAX_STOP_IDS = 8 };

typedef struct {
    const char *path;
    int n_pieces;
    Piece *pieces;
    char *text;         // of all pieces
    int *hash;          // [hash_size] piece ids or -1, open addressing; only pieces that text may become
    uint32_t hash_size; // a power of two
    int byte_ids[256];  // id of the piece of a byte, or -1
    int bos, unknown;   // ids
    bool space_prefix;  // a space goes in front of a text
    int stop_ids[MAX_STOP_IDS], n_stop_ids;
} Tokenizer;

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

// The byte that a piece "<0xHH>" stands for, or -1.
static int byte_of_piece(const char *text, int len) {
    static const char digits[] = "0123456789ABCDEF";
    if (len != 6 || memcmp(text, "<0x", 3) || text[5] != '>') return -1;
    const char *high = memchr(digits, text[3], 16), *low = memchr(digits, text[4], 16);
    return high && low ? (int)((high - digits) * 16 + (low - digits)) : -1;
}

// Fill the hash and byte_ids from pieces whose types are known. Of two pieces with the same text the first counts.
static void tokenizer_index(Tokenizer *t) {
    t->hash_size = 16;
    while (t->hash_size < 2 * (uint32_t)t->n_pieces) t->hash_size *= 2;
    t->hash = alloc(t->hash_size, sizeof *t->hash, "vocabulary");
    memset(t->hash, -1, t->hash_size * sizeof *t->hash);
    memset(t->byte_ids, -1, sizeof t->byte_ids);
    for (int id = 0; id < t->n_pieces; id++) {
        const Piece *p = &t->pieces[id];
        if (p->type == BYTE_PIECE) {
            int byte = byte_of_piece(p->text, p->len);
            if (byte >= 0 && t->byte_ids[byte] < 0) t->byte_ids[byte] = id;
        } else if (p->type == NORMAL_PIECE && p->len > 0) {
            uint32_t slot = hash_slot(t, p->text, (size_t)p->len);
            if (t->hash[slot] < 0) t->hash[slot] = id;
        }
    }
}

// llama2.c's tokenizer.bin: int32 longest piece, then for each id float32 score, int32 length, bytes; to the end of the
// file. Ids 0, 1, 2 are <unk>, <s>, </s>.
static Tokenizer *tokenizer_load(const char *path) {
    Mapping file = map_file(path);
    Reader r = {path, file.data, file.size, 0};
    Tokenizer *t = alloc(1, sizeof *t, "tokenizer");
    t->path = path;
    reader_i32(&r, "longest piece");
    size_t most = (r.size - r.pos) / 8, text_size = 0;
    if (most > INT_MAX / 4) die("%s: too large for a tokenizer: %zu bytes", path, r.size);
    t->pieces = alloc(most, sizeof *t->pieces, "vocabulary");
    t->text = alloc(r.size, 1, "vocabulary");
    for (; r.pos < r.size; t->n_pieces++) {
        float score = reader_f32(&r, "score of a piece");
        int len = reader_i32(&r, "length of a piece");
        if (len < 0) die("%s: piece %d at offset %zu: expected a length, got %d", path, t->n_pieces, r.pos - 4, len);
        if (isnan(score)) die("%s: piece %d at offset %zu: its score is not a number", path, t->n_pieces, r.pos - 8);
        char *text = memcpy(t->text + text_size, reader_take(&r, (size_t)len, "a piece"), (size_t)len);
        text_size += (size_t)len;
        PieceType type = t->n_pieces == 0 ? UNKNOWN_PIECE : t->n_pieces <= 2 ? CONTROL_PIECE : NORMAL_PIECE;
        if (type == NORMAL_PIECE && byte_of_piece(text, len) >= 0) type = BYTE_PIECE;
        t->pieces[t->n_pieces] = (Piece){text, len, score, type};
    }
    if (t->n_pieces < 3) die("%s: expected at least the pieces <unk>, <s> and </s>, got %d", path, t->n_pieces);
    unmap_file(&file);
    t->unknown = 0;
    t->bos = 1;
    t->stop_ids[t->n_stop_ids++] = 1; // llama2.c's models end a text by beginning the next one
    t->stop_ids[t->n_stop_ids++] = 2;
    tokenizer_index(t);
    t->space_prefix = tokenizer_find(t, " ", 1) >= 0;
    return t;
}

static void tokenizer_free(Tokenizer *t) {
    free(t->pieces);
    free(t->text);
    free(t->hash);
    free(t);
}

static bool tokenizer_stops(const Tokenizer *t, int id) {
    for (int i = 0; i < t->n_stop_ids; i++)
        if (t->stop_ids[i] == id) return true;
    return false;
}

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
        uint8_t low = b[0] == 0xE0   ? 0xA0
                      : b[0] == 0xF0 ? 0x90
                                     : 0x80,
                high = b[0] == 0xED   ? 0x9F
                       : b[0] == 0xF4 ? 0x8F
                                      : 0xBF;
        if (b[1] < low || b[1] > high) return -1;
    }
    for (int i = 2; i < len && (size_t)i < n; i++)
        if ((b[i] & 0xC0) != 0x80) return -1;
    return (size_t)len <= n ? len : 0;
}

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
    int len, prev, next; // prev, next: indices or -1; len 0: was merged into its left neighbour
} Symbol;

// If the symbol at left and its successor join to a piece, they become a candidate.
static void bpe_consider(const Tokenizer *t, const Symbol *symbols, int left, Ranked *heap, int *n_heap) {
    int right = left < 0 ? -1 : symbols[left].next;
    if (right < 0) return;
    int len = symbols[left].len + symbols[right].len;
    int id = tokenizer_find(t, symbols[left].text, (size_t)len);
    if (id >= 0) heap_push(heap, n_heap, (Ranked){t->pieces[id].score, left, len});
}

// Merge until nothing merges. Each merge makes at most two new candidates, so the heap never holds more than 3n.
static void bpe_merge(const Tokenizer *t, Symbol *symbols, int n) {
    Ranked *heap = alloc(3 * (size_t)n, sizeof *heap, "tokenizer");
    int n_heap = 0;
    for (int i = 0; i < n; i++) bpe_consider(t, symbols, i, heap, &n_heap);
    while (n_heap > 0) {
        Ranked best = heap_pop(heap, &n_heap);
        Symbol *left = &symbols[best.index];
        if (left->len == 0 || left->next < 0) continue;
        Symbol *right = &symbols[left->next];
        if (left->len + right->len != best.extra) continue; // one side has merged otherwise since
        left->len += right->len;
        right->len = 0;
        left->next = right->next;
        if (left->next >= 0) symbols[left->next].prev = best.index;
        bpe_consider(t, symbols, left->prev, heap, &n_heap);
        bpe_consider(t, symbols, best.index, heap, &n_heap);
    }
    free(heap);
}

// Append the ids of a text, sentencepiece-style: a space goes in front of a text that is not empty, where the vocabulary
// has one. Special pieces are never found in text.
static void tokenizer_encode(const Tokenizer *t, const char *text, size_t n, Ids *ids) {
    if (n == 0) return;
    if (n > INT_MAX / 8) die("a text of %zu bytes is too long to tokenize, the most is %d", n, INT_MAX / 8);
    Symbol *symbols = alloc(n + 1, sizeof *symbols, "tokenizer");
    Text prefixed = {0};
    if (t->space_prefix) text_append(&prefixed, " ", 1);
    text_append(&prefixed, text, n);
    int n_symbols = 0;
    for (size_t i = 0; i < prefixed.len; n_symbols++) {
        int len = max_int(1, utf8_scan(prefixed.data + i, prefixed.len - i));
        symbols[n_symbols] = (Symbol){prefixed.data + i, len, n_symbols - 1, n_symbols + 1};
        i += (size_t)len;
    }
    symbols[n_symbols - 1].next = -1;
    bpe_merge(t, symbols, n_symbols);
    for (int i = 0; i >= 0; i = symbols[i].next) {
        int id = tokenizer_find(t, symbols[i].text, (size_t)symbols[i].len);
        if (id >= 0) ids_append(ids, id);
        for (int j = 0; id < 0 && j < symbols[i].len; j++) {
            int byte_id = t->byte_ids[(uint8_t)symbols[i].text[j]];
            ids_append(ids, byte_id >= 0 ? byte_id : t->unknown);
        }
    }
    free(prefixed.data);
    free(symbols);
}

// Ids back to text, one at a time. A character may be spread over several byte pieces: its bytes wait until it is whole.
// Bytes that cannot become a character pass as they are.
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
    if (p->type == BYTE_PIECE) decoder_byte(d, (char)byte_of_piece(p->text, p->len), out);
    else
        for (int i = d->after_bos && t->space_prefix && p->len > 0 && p->text[0] == ' '; i < p->len; i++)
            decoder_byte(d, p->text[i], out);
    d->after_bos = false;
}

// ---------------------------------------------------------------------------------------------------------------------
// §9 Sampler
//
// From logits to the next token, in this order: repetition penalty, temperature, top-k, softmax, min-p, top-p, draw.
//
//     temperature  logits / T: below 1 the likely become likelier; 0 means no draw, the most likely token
//     top-k        only the k most likely
//     min-p        only those with at least min_p times the probability of the most likely
//     top-p        only the most likely whose probabilities add up to more than p (the nucleus; Holtzman et al. 2020)
//     penalty      logits of tokens already in the text are divided by it if positive, else multiplied (Keskar et al. 2019)
//
// Tokens of equal rank go by lower id.

typedef struct {
    float temperature, top_p, min_p, repeat_penalty;
    int top_k; // 0: all
} Sampling;

typedef struct {
    Sampling sampling;
    uint64_t rng;
    int n;              // vocabulary size
    float *p;           // [n padded to 16] logits, then probabilities
    Ranked *candidates; // [n]
    bool *seen;         // [n]
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
    size_t n = pad((size_t)vocab_size, SUM_LANES);
    *s = (Sampler){sampling,
                   rng_seed(seed),
                   vocab_size,
                   alloc(n, sizeof(float), "sampler"),
                   alloc(n, sizeof(Ranked), "sampler"),
                   alloc(n, sizeof(bool), "sampler")};
    return s;
}

static void sampler_free(Sampler *s) {
    free(s->p);
    free(s->candidates);
    free(s->seen);
    free(s);
}

static int argmax(const float *x, int n) {
    int best = 0;
    for (int i = 1; i < n; i++)
        if (x[i] > x[best]) best = i;
    return best;
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

static void softmax(float *x, int n) {
    float max = x[argmax(x, n)];
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

// A draw from the best candidates. Only as many as the nucleus needs are taken out of the heap, in falling order; the
// coin then walks these. A probability below (1 - p) / (n - 1) cannot be part of it: the heap need not hold them.
static int draw_from_nucleus(Sampler *s, float smallest, float coin) {
    float top_p = s->sampling.top_p > 0 && s->sampling.top_p < 1 ? s->sampling.top_p : 1;
    if (top_p < 1) smallest = fmaxf(smallest, (1 - top_p) / (float)(s->n - 1));
    int n = 0, taken = 0;
    for (int i = 0; i < s->n; i++)
        if (s->p[i] > 0 && s->p[i] >= smallest) s->candidates[n++] = (Ranked){s->p[i], i, 0};
    if (n == 0) return argmax(s->p, s->n);
    heap_build(s->candidates, n);
    float mass = 0;
    Ranked *nucleus = s->candidates + n; // popped entries gather from the end of the heap's array downwards
    while (n > 0 && (taken == 0 || mass <= top_p)) {
        Ranked best = heap_pop(s->candidates, &n); // frees the slot behind the heap
        *--nucleus = best;
        mass += best.score;
        taken++;
    }
    float r = coin * mass, cdf = 0;
    for (int i = taken - 1; i >= 0; i--) {
        cdf += nucleus[i].score;
        if (r < cdf) return nucleus[i].index;
    }
    return nucleus[0].index;
}

// log softmax(logits)[id]. logits: [n padded to 16], and is overwritten.
static double log_probability(float *logits, int n, int id) {
    float max = logits[argmax(logits, n)], chosen = logits[id];
    int padded = (int)pad((size_t)n, SUM_LANES);
    for (int i = n; i < padded; i++) logits[i] = -INFINITY;
    return (double)chosen - (double)max - log((double)exp_and_sum(logits, padded, max));
}

// The next token. logits: [n]; history: the ids so far, for the penalty. Returns -1 where the logits hold a NaN or no
// finite maximum: a broken model. One random number is drawn for each token, none at temperature 0.
static int sampler_pick(Sampler *s, const float *logits, const int *history, int n_history) {
    const Sampling *how = &s->sampling;
    for (int i = 0; i < s->n; i++)
        if (isnan(logits[i])) return -1;
    memcpy(s->p, logits, (size_t)s->n * sizeof *s->p);
    apply_penalty(s, history, n_history);
    int best = argmax(s->p, s->n);
    if (!isfinite(s->p[best])) return -1;
    if (how->temperature == 0) return best;
    float coin = rng_float(&s->rng);
    for (int i = 0; i < s->n; i++) s->p[i] /= how->temperature;
    if (!isfinite(s->p[best])) return best; // a temperature so low that it overflows: its limit is the best token
    apply_top_k(s);
    softmax(s->p, s->n);
    bool cut = (how->top_k > 0 && how->top_k < s->n) || how->min_p > 0 || (how->top_p > 0 && how->top_p < 1);
    if (!cut) return draw_from_all(s->p, s->n, coin);
    return draw_from_nucleus(s, how->min_p * s->p[argmax(s->p, s->n)], coin);
}

// ---------------------------------------------------------------------------------------------------------------------
// §11 Modes
//
// What a user can ask for. Each mode is a function from the options of §12 to an exit code. Generated text goes to
// stdout, everything else to stderr.

typedef struct {
    const char *checkpoint, *tokenizer, *mode, *prompt, *file;
    double temperature, top_p, min_p, repeat_penalty;
    int top_k, n_tokens, context, threads, chunk, window, stride;
    uint64_t seed;
    bool seed_given, no_bos, stats, help, version;
    const char **stops;
    int n_stops;
} Options;

static volatile sig_atomic_t interrupted; // set by Ctrl-C

static void on_interrupt(int signal_number) {
    (void)signal_number;
    interrupted = 1;
}

// From here on the first Ctrl-C asks to stop after the current step; a second one ends the process.
static void catch_interrupt(void) {
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = (int)SA_RESETHAND};
    sigaction(SIGINT, &action, NULL);
}

static void write_out(const char *bytes, size_t n) {
    if ((n > 0 && fwrite(bytes, 1, n, stdout) != n) || fflush(stdout))
        die("cannot write to standard output: %s", strerror(errno));
}

static bool stdin_is_redirected(void) {
    struct stat status;
    return !fstat(STDIN_FILENO, &status) && (S_ISREG(status.st_mode) || S_ISFIFO(status.st_mode));
}

// The prompt: -i, else -f, else what is redirected to standard input, else nothing. Editors end a file with a newline
// that nobody means as part of the prompt: one is dropped from a file or stream unless `exact`.
static Text read_prompt(const Options *o, bool exact) {
    Text text = {0};
    if (o->prompt && o->file) die_usage("--prompt and --file: expected one of the two, got both");
    if (o->prompt) {
        text_append(&text, o->prompt, strlen(o->prompt));
        return text;
    }
    if (o->file) text = read_text_file(o->file);
    else if (stdin_is_redirected()) text = read_text_file("-");
    if (!exact && text.len > 0 && text.data[text.len - 1] == '\n') text.len--;
    return text;
}

// Everything that a mode with a model works with.
typedef struct {
    Model *model;
    Tokenizer *tokenizer;
    Session *session;
    int n_threads;
    double load_seconds;
} Engine;

enum { TINY_MODEL = 4 << 20 }; // bytes read per token

static int choose_context(const Options *o, const Config *c) {
    if (o->context > c->n_ctx_train)
        fprintf(stderr, "run: note: --context %d is more than the %d positions that the model was trained for\n",
                o->context, c->n_ctx_train);
    return o->context ? o->context : min_int(c->n_ctx_train, 4096);
}

static void engine_load(Engine *e, const Options *o) {
    double start = seconds();
    if (!o->checkpoint)
        die_usage("expected a checkpoint, as in: run model.bin -i \"Once upon a time\" (run -h for help)");
    e->n_threads = o->threads ? o->threads : default_threads();
    e->model = model_load(o->checkpoint, e->n_threads);
    // A token of a tiny model is done before a second thread has woken up.
    if (!o->threads && model_bytes_per_token(e->model) < TINY_MODEL) e->n_threads = 1;
    e->tokenizer = tokenizer_load(o->tokenizer);
    if (e->tokenizer->n_pieces != e->model->config.vocab_size)
        die("%s has %d pieces, but %s has a vocabulary of %d: expected a matching tokenizer (--tokenizer FILE)",
            o->tokenizer, e->tokenizer->n_pieces, o->checkpoint, e->model->config.vocab_size);
    e->load_seconds = seconds() - start;
}

static void engine_free(Engine *e) {
    if (e->session) session_free(e->session);
    tokenizer_free(e->tokenizer);
    model_free(e->model);
}

// Run ids[0..n) at positions from pos on through the model, in chunks. The logits of the last are s->logits[0]. False
// where Ctrl-C came first.
static bool prefill(Session *s, const int *ids, int n, int pos, int seq) {
    Row *rows = alloc((size_t)s->max_rows, sizeof *rows, "rows");
    for (int done = 0; done < n && !interrupted;) {
        int count = min_int(n - done, s->max_rows);
        for (int i = 0; i < count; i++) rows[i] = (Row){ids[done + i], pos + done + i, seq, done + i == n - 1};
        forward(s, rows, count);
        done += count;
    }
    free(rows);
    return !interrupted;
}

// --- generate

// Generated text on its way to stdout. Bytes that may be the beginning of a stop string wait until that is decided.
typedef struct {
    const Options *options;
    Text held;
    bool stopped;
} Output;

// Print what can be printed; `last`: nothing more will come, so nothing waits.
static void output_flush(Output *o, bool last) {
    size_t n = o->held.len, hold = 0;
    for (int i = 0; i < o->options->n_stops; i++) {
        const char *stop = o->options->stops[i];
        size_t len = strlen(stop);
        char *found = o->held.len >= len ? memmem(o->held.data, o->held.len, stop, len) : NULL;
        if (found && (size_t)(found - o->held.data) < n) {
            n = (size_t)(found - o->held.data);
            o->stopped = true;
        }
        for (size_t k = len - 1; k > hold; k--) // the longest end of the text that begins a stop string
            if (k <= o->held.len && !memcmp(o->held.data + o->held.len - k, stop, k)) hold = k;
    }
    if (!o->stopped && !last) n -= hold;
    write_out(o->held.data, n);
    o->held.len -= n;
    if (o->held.len) memmove(o->held.data, o->held.data + n, o->held.len);
}

typedef struct {
    double start, first, prefill_seconds; // times; of the first token
    double *latency;                      // [n] seconds from token to token
    int n, n_prompt;
} Timing;

static int compare_doubles(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void print_stats(const Engine *e, Timing *t, uint64_t seed) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double peak = (double)usage.ru_maxrss / 1024;
#ifdef __APPLE__
    peak /= 1024; // in bytes there
#endif
    double total = 0;
    for (int i = 0; i < t->n; i++) total += t->latency[i];
    fprintf(stderr, "load              %.3f s, %d thread%s\n", e->load_seconds, e->n_threads,
            e->n_threads == 1 ? "" : "s");
    fprintf(stderr, "time to first token %.1f ms\n", (t->first - t->start) * 1e3);
    fprintf(stderr, "prefill           %.1f tokens/s (%d tokens)\n", t->n_prompt / t->prefill_seconds, t->n_prompt);
    if (t->n > 0) {
        qsort(t->latency, (size_t)t->n, sizeof *t->latency, compare_doubles);
        double median = t->latency[t->n / 2];
        fprintf(stderr, "decode            %.1f tokens/s (%d tokens)\n", t->n / total, t->n);
        fprintf(stderr, "inter-token       median %.2f ms, p99 %.2f ms\n", median * 1e3,
                t->latency[(t->n - 1) * 99 / 100] * 1e3);
        fprintf(stderr, "weights read      %.1f GB/s\n", (double)model_bytes_per_token(e->model) / median / 1e9);
    }
    fprintf(stderr, "peak memory       %.0f MiB\n", peak);
    fprintf(stderr, "seed              %llu\n", (unsigned long long)seed);
}

// The autoregressive loop: sample a token from the logits, print it, run it through the model. Returns the exit code.
static int generate_tokens(Engine *e, const Options *o, Ids *ids, Sampler *sampler, int max_new, Timing *timing) {
    Session *s = e->session;
    Output out = {.options = o};
    Decoder decoder = {.after_bos = ids->len == 1 && ids->id[0] == e->tokenizer->bos};
    int made = 0;
    timing->latency = alloc((size_t)max_new + 1, sizeof(double), "statistics");
    double last = timing->start;
    bool alive = prefill(s, ids->id, ids->len, 0, 0);
    timing->prefill_seconds = seconds() - timing->start;
    while (alive && made < max_new) {
        int id = sampler_pick(sampler, s->logits, ids->id, ids->len);
        if (id < 0)
            die("%s: the logits at position %d are not finite numbers: the weights are broken", o->checkpoint,
                ids->len - 1);
        double now = seconds();
        if (made++ == 0) timing->first = now;
        else timing->latency[timing->n++] = now - last;
        last = now;
        if (tokenizer_stops(e->tokenizer, id)) break;
        decoder_push(&decoder, e->tokenizer, id, &out.held);
        output_flush(&out, false);
        ids_append(ids, id);
        if (out.stopped || interrupted || made == max_new) break;
        forward(s, &(Row){id, ids->len - 1, 0, true}, 1);
    }
    if (!out.stopped) {
        decoder_flush(&decoder, &out.held);
        output_flush(&out, true);
    }
    write_out("\n", 1);
    free(out.held.data);
    return interrupted ? 130 : 0;
}

static int mode_generate(const Options *o) {
    Text prompt = read_prompt(o, false);
    Engine e = {0};
    engine_load(&e, o);
    Ids ids = {0};
    if (!o->no_bos) ids_append(&ids, e.tokenizer->bos);
    tokenizer_encode(e.tokenizer, prompt.data, prompt.len, &ids);
    if (ids.len == 0) die_usage("--no-bos: expected a prompt, got none: there is no token to start from");
    int n_ctx = choose_context(o, &e.model->config);
    if (ids.len > n_ctx) die("the prompt has %d tokens, but the context holds %d (--context N)", ids.len, n_ctx);
    e.session = session_open(e.model, n_ctx, 1, min_int(o->chunk, ids.len), 1, e.n_threads);
    // -n counts all steps, prompt included, as it does in llama2.c; the token made last needs no position of its own.
    int n_max = o->n_tokens ? min_int(o->n_tokens, n_ctx) : n_ctx;
    int max_new = max_int(0, n_max - (ids.len - 1));
    uint64_t seed =
        o->seed_given ? o->seed : (uint64_t)(seconds() * 1e9) ^ (uint64_t)getpid() << 32 ^ (uint64_t)time(NULL);
    Sampling sampling = {(float)o->temperature, (float)o->top_p, (float)o->min_p, (float)o->repeat_penalty, o->top_k};
    Sampler *sampler = sampler_open(sampling, seed, e.model->config.vocab_size);
    catch_interrupt();
    Timing timing = {.start = seconds(), .n_prompt = ids.len};
    timing.first = timing.start;
    write_out(prompt.data, prompt.len);
    int status = generate_tokens(&e, o, &ids, sampler, max_new, &timing);
    if (o->stats) print_stats(&e, &timing, seed);
    free(timing.latency);
    free(ids.id);
    free(prompt.data);
    sampler_free(sampler);
    engine_free(&e);
    return status;
}

// --- tokenize: the ids of a text, on one line

static int mode_tokenize(const Options *o) {
    if (!o->prompt && !o->file && !stdin_is_redirected())
        die_usage("tokenize: expected a text in --prompt, --file or standard input");
    Text text = read_prompt(o, true);
    Tokenizer *t = tokenizer_load(o->tokenizer);
    Ids ids = {0};
    if (!o->no_bos) ids_append(&ids, t->bos);
    tokenizer_encode(t, text.data, text.len, &ids);
    Text line = {0};
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

static const char *type_name(Type type) {
    static const char *const names[] = {"f32", "f16", "bf16", "int8", "int4"};
    return names[type];
}

static void print_matrix(const char *name, const Matrix *w, int copies) {
    char group[32] = "";
    if (w->type == I8) snprintf(group, sizeof group, ", groups of %d", w->group);
    printf("  %-10s %4d x [%d, %d] %s%s, %.1f MiB\n", name, copies, w->rows, w->cols, type_name(w->type), group,
           (double)copies * (double)matrix_bytes(w) / (1 << 20));
}

static int mode_info(const Options *o) {
    if (!o->checkpoint) die_usage("info: expected a checkpoint, as in: run model.bin -m info");
    Model *m = model_load(o->checkpoint, o->threads ? o->threads : default_threads());
    const Config *c = &m->config;
    int n_ctx = choose_context(o, c);
    size_t per_token = 2 * (size_t)c->n_layers * (size_t)kv_dim(c) * sizeof(float);
    size_t weights = model_bytes_per_token(m) + (m->tied ? 0 : matrix_bytes(&m->embed));
    printf("file            %s\n", m->path);
    printf("format          %s\n", m->format);
    printf("dim             %d\nhidden_dim      %d\nn_layers        %d\n", c->dim, c->hidden_dim, c->n_layers);
    printf("n_heads         %d\nn_kv_heads      %d\nhead_dim        %d\n", c->n_heads, c->n_kv_heads, c->head_dim);
    printf("vocab_size      %d\ntrained context %d\n", c->vocab_size, c->n_ctx_train);
    printf("norm epsilon    %g\nRoPE base       %g\n", (double)c->norm_eps, c->rope_base);
    printf("output          %s\n", m->tied ? "tied to the embedding" : "separate");
    printf("weights         %.1f MiB in memory, %.1f MiB read for each token\n", (double)weights / (1 << 20),
           (double)model_bytes_per_token(m) / (1 << 20));
    printf("KV cache        %zu bytes per token (f32), %.1f MiB for a context of %d\n", per_token,
           (double)per_token * n_ctx / (1 << 20), n_ctx);
    const Layer *a = &m->layers[0];
    printf("matrices        of the first layer stand for all\n");
    print_matrix("embed", &m->embed, 1);
    print_matrix("q", &a->q, c->n_layers);
    print_matrix("k", &a->k, c->n_layers);
    print_matrix("v", &a->v, c->n_layers);
    print_matrix("o", &a->o, c->n_layers);
    print_matrix("gate", &a->gate, c->n_layers);
    print_matrix("up", &a->up, c->n_layers);
    print_matrix("down", &a->down, c->n_layers);
    if (!m->tied) print_matrix("output", &m->output, 1);
    write_out("", 0);
    model_free(m);
    return 0;
}

// --- perplexity: how surprised a model is by a text
//
// perplexity = exp(mean of -log p(token | what stands before it)). A text longer than the window is cut into windows that
// overlap: each begins with BOS and holds window - 1 tokens of text, the next starts `stride` tokens later, and in each
// only those tokens count that no earlier window has scored. So every token counts once, with some context before it.

enum { PERPLEXITY_ROWS = 32 }; // logits of so many positions are held at a time

typedef struct {
    double sum, sum_of_squares; // of -log p
    size_t n, bytes;            // tokens scored, and the bytes they stand for
} Surprise;

// Score the tokens of one window, ids[0..n) behind a BOS, from index `first` on.
static void score_window(Engine *e, const int *ids, int n, int first, Surprise *total) {
    Row rows[PERPLEXITY_ROWS];
    for (int done = 0; done < n && !interrupted;) { // row i holds the token before ids[i] and predicts ids[i]
        int count = min_int(n - done, PERPLEXITY_ROWS);
        for (int i = 0; i < count; i++) {
            int at = done + i;
            rows[i] = (Row){at ? ids[at - 1] : e->tokenizer->bos, at, 0, at >= first};
        }
        forward(e->session, rows, count);
        for (int i = 0; i < e->session->n_wanted; i++) {
            int id = ids[done + e->session->wanted[i]];
            float *logits = e->session->logits + (size_t)i * e->session->vocab_stride;
            double nll = -log_probability(logits, e->model->config.vocab_size, id);
            if (!isfinite(nll)) die("the logits are not finite numbers: the weights are broken");
            const Piece *piece = &e->tokenizer->pieces[id];
            total->sum += nll;
            total->sum_of_squares += nll * nll;
            total->n++;
            total->bytes += piece->type == BYTE_PIECE ? 1 : (size_t)piece->len;
        }
        done += count;
    }
}

static int mode_perplexity(const Options *o) {
    if (!o->prompt && !o->file && !stdin_is_redirected())
        die_usage("perplexity: expected a text in --file, --prompt or standard input");
    Text text = read_prompt(o, true);
    Engine e = {0};
    engine_load(&e, o);
    Ids ids = {0};
    tokenizer_encode(e.tokenizer, text.data, text.len, &ids);
    if (ids.len == 0) die("perplexity: expected a text, got an empty one");
    int n = o->n_tokens ? min_int(ids.len, o->n_tokens) : ids.len;
    int window = o->window ? o->window : min_int(512, e.model->config.n_ctx_train);
    int stride = o->stride ? o->stride : max_int(1, window / 2);
    if (window < 2) die_usage("--window: expected at least 2 (a BOS and a token), got %d", window);
    if (stride > window - 1)
        die_usage("--stride: expected at most window - 1 = %d, got %d: tokens would be left out", window - 1, stride);
    e.session = session_open(e.model, window, 1, PERPLEXITY_ROWS, PERPLEXITY_ROWS, e.n_threads);
    catch_interrupt();
    Surprise total = {0};
    for (int begin = 0, scored = 0; scored < n && !interrupted; begin += stride) {
        int count = min_int(window - 1, n - begin);
        score_window(&e, ids.id + begin, count, scored - begin, &total);
        scored = begin + count;
    }
    if (e.tokenizer->space_prefix) total.bytes--; // the space in front is not of the text
    double mean = total.sum / (double)total.n, variance = total.sum_of_squares / (double)total.n - mean * mean;
    double perplexity = exp(mean), error = perplexity * sqrt(fmax(variance, 0) / (double)total.n); // delta method
    printf("perplexity %.4f ± %.4f, %.4f nats per token, %.4f bits per byte (%zu tokens, window %d, stride %d)\n",
           perplexity, error, mean, total.sum / M_LN2 / (double)total.bytes, total.n, window, stride);
    write_out("", 0);
    free(text.data);
    free(ids.id);
    engine_free(&e);
    return interrupted ? 130 : 0;
}

// ---------------------------------------------------------------------------------------------------------------------
// §12 Command line
//
// One table says what an option is called, what it takes, where its value goes and what it is for. Parsing and help read
// the table, so neither can forget an option. llama2.c's options keep their letters and meaning.

typedef enum { FLAG, TEXT, LIST, REAL, INTEGER, SEED } Kind;

typedef struct {
    char letter; // or 0
    const char *name;
    Kind kind;
    size_t offset; // of the value in Options
    double min, max;
    const char *initial; // the default, written as a user would
    const char *argument, *help;
} Option;

#define AT(field) offsetof(Options, field)
static const Option options[] = {
    {'i', "prompt", TEXT, AT(prompt), 0, 0, NULL, "TEXT", "the prompt (no escapes: use a file for line breaks)"},
    {'f', "file", TEXT, AT(file), 0, 0, NULL, "FILE", "read the prompt or text from FILE; - is standard input"},
    {'n', "tokens", INTEGER, AT(n_tokens), 0, INT_MAX, NULL, "N",
     "steps, the prompt's included; 0: until the context is full (256)"},
    {'m', "mode", TEXT, AT(mode), 0, 0, "generate", "MODE", "generate, tokenize, info or perplexity"},
    {'z', "tokenizer", TEXT, AT(tokenizer), 0, 0, "tokenizer.bin", "FILE", "the tokenizer"},
    {0, "stop", LIST, AT(stops), 0, 0, NULL, "TEXT", "end before this text appears; may be repeated"},
    {0, "no-bos", FLAG, AT(no_bos), 0, 0, NULL, NULL, "do not begin with the BOS token"},
    {'t', "temperature", REAL, AT(temperature), 0, 1e6, "1.0", "T", "0 takes the most likely token"},
    {'p', "top-p", REAL, AT(top_p), 0, 1, "0.9", "P", "sample from the nucleus of mass P; 0 or 1: off"},
    {'k', "top-k", INTEGER, AT(top_k), 0, INT_MAX, "0", "K", "sample from the K most likely; 0: off"},
    {0, "min-p", REAL, AT(min_p), 0, 1, "0", "P", "drop tokens below P times the most likely one's probability"},
    {0, "repeat-penalty", REAL, AT(repeat_penalty), 1e-6, 1e6, "1.0", "R",
     "above 1: make tokens of the text so far less likely"},
    {'s', "seed", SEED, AT(seed), 0, 0, NULL, "N", "64-bit seed (from the clock; --stats shows it)"},
    {'c', "context", INTEGER, AT(context), 1, 1 << 26, NULL, "N", "positions to keep (the model's, at most 4096)"},
    {'j', "threads", INTEGER, AT(threads), 1, 1024, NULL, "N", "threads (one for each physical core)"},
    {0, "chunk", INTEGER, AT(chunk), 1, 1 << 16, "256", "N", "prompt tokens that are computed together"},
    {0, "window", INTEGER, AT(window), 2, 1 << 26, NULL, "N", "perplexity: tokens in a window (512)"},
    {0, "stride", INTEGER, AT(stride), 1, 1 << 26, NULL, "N", "perplexity: tokens from window to window (half)"},
    {0, "stats", FLAG, AT(stats), 0, 0, NULL, NULL, "speed, memory and seed, on standard error"},
    {'h', "help", FLAG, AT(help), 0, 0, NULL, NULL, "this text"},
    {0, "version", FLAG, AT(version), 0, 0, NULL, NULL, "the version"},
};
enum { N_OPTIONS = sizeof options / sizeof *options };

static const struct {
    const char *name;
    int (*run)(const Options *);
} modes[] = {
    {"generate", mode_generate}, {"tokenize", mode_tokenize}, {"info", mode_info}, {"perplexity", mode_perplexity}};
enum { N_MODES = sizeof modes / sizeof *modes };

static void print_help(void) {
    printf("run %s: inference of Llama-family models\n\n", RUN_VERSION);
    printf("usage: run MODEL [options]\n");
    printf("       run stories.bin -i \"Once upon a time\" -n 100\n\n");
    for (int i = 0; i < N_OPTIONS; i++) {
        const Option *o = &options[i];
        char left[64];
        snprintf(left, sizeof left, o->letter ? "-%c, --%s %s" : "%.0d    --%s %s", o->letter, o->name,
                 o->argument ? o->argument : "");
        printf("  %-26s %s", left, o->help);
        if (o->initial) printf(" (%s)", o->initial);
        printf("\n");
    }
    printf(
        "\nWithout -i and -f, redirected standard input is the prompt. Text goes to standard output, everything else\n"
        "to standard error. Exit code: 0 done, 1 bad data or failure, 2 bad usage, 130 after Ctrl-C.\n");
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
    char bare[32];
    snprintf(bare, sizeof bare, "%.*s", (int)min_int((int)min_int(INT_MAX, (int)len), 31), name);
    unknown_option(argument, bare);
}

static Options parse_options(int argc, char **argv) {
    Options o = {.n_tokens = -1};
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

int main(int argc, char **argv) {
    Options o = parse_options(argc, argv);
    int status = -1;
    if (o.help || o.version) {
        if (o.help) print_help();
        else printf("run %s\n", RUN_VERSION);
        write_out("", 0);
        status = 0;
    }
    bool generating = !strcmp(o.mode, "generate");
    if (o.n_tokens < 0) o.n_tokens = generating ? 256 : 0;
    for (int i = 0; i < N_MODES && status < 0; i++)
        if (!strcmp(o.mode, modes[i].name)) status = modes[i].run(&o);
    if (status < 0) die_usage("--mode: expected generate, tokenize, info or perplexity, got '%s'", o.mode);
    free(o.stops);
    return status;
}

#ifdef RUN_LIBRARY
// ---------------------------------------------------------------------------------------------------------------------
// The library door: with -DRUN_LIBRARY this file becomes a shared library without main, for tests and fuzzers.

#define API __attribute__((visibility("default")))

API void *lib_model(const char *path, int n_threads) {
    return model_load(path, n_threads);
}

API void lib_model_free(void *model) {
    model_free(model);
}

API int lib_vocab_size(const void *model) {
    return ((const Model *)model)->config.vocab_size;
}

API void *lib_session(const void *model, int n_ctx, int n_seqs, int max_rows, int n_threads) {
    return session_open(model, n_ctx, n_seqs, max_rows, max_rows, n_threads);
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
    return tokenizer_load(path);
}

API void lib_tokenizer_free(void *tokenizer) {
    tokenizer_free(tokenizer);
}

API int lib_encode(const void *tokenizer, const char *text, int len, int bos, int *out) {
    const Tokenizer *t = tokenizer;
    Ids ids = {0};
    if (bos) ids_append(&ids, t->bos);
    tokenizer_encode(t, text, (size_t)len, &ids);
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

// y[n][rows] = x[n][cols] . w^T for a matrix given row by row: type F32, or I8 with scales [rows][cols / group].
API void lib_matmul(int type, int rows, int cols, int group, const void *w, const float *scales, const float *x, int n,
                    float *y, int n_threads) {
    Model m = {.n_threads = n_threads};
    Matrix matrix = matrix_load(&m, (Type)type, rows, cols, group, w, (const uint8_t *)scales);
    size_t stride = pad((size_t)cols, BLOCK), y_stride = pad((size_t)rows, PANEL), count = (size_t)n;
    Activations in = {stride, alloc(count * stride, sizeof(float), "x"), alloc(count * stride, 1, "x"),
                      alloc(count * stride / BLOCK, sizeof(float), "x"),
                      alloc(count * stride / 16, sizeof(int32_t), "x")};
    float *out = alloc(count * y_stride, sizeof *out, "y");
    for (int r = 0; r < n; r++) {
        memcpy(in.f + (size_t)r * stride, x + (size_t)r * (size_t)cols, (size_t)cols * sizeof *x);
        quantize_row(&in, r, cols);
    }
#pragma omp parallel num_threads(n_threads)
    matmul(out, y_stride, &in, n, &matrix);
    for (size_t r = 0; r < count; r++) memcpy(y + r * (size_t)rows, out + r * y_stride, (size_t)rows * sizeof *y);
    free(in.f);
    free(in.q);
    free(in.scale);
    free(in.sum);
    free(out);
    matrix_free(&matrix);
}
#endif
