// run.c as a shared library without main: a door for tests and fuzzers, which call these functions through ctypes.

#define main run_main
#include "../run.c"
#undef main

void *lib_model(const char *path, int n_threads) {
    Checkpoint *checkpoint = checkpoint_open(path);
    Model *m = model_load(checkpoint, n_threads);
    checkpoint_close(checkpoint);
    return m;
}

void lib_model_free(void *model) {
    model_free(model);
}

int lib_vocab_size(const void *model) {
    return ((const Model *)model)->config.vocab_size;
}

void *lib_session(const void *model, int n_ctx, int n_seqs, int max_rows, int n_threads) {
    return session_open(model, F32, n_ctx, n_seqs, max_rows, max_rows, n_threads);
}

// --rope-scaling: 1 linear, 2 yarn, 3 ntk; and --rope-factor
void lib_rope_stretch(void *model, int scaling, double factor) {
    rope_stretch(model, (RopeScaling)scaling, factor);
}

// With a key/value cache of another type: 0 f32, 1 f16, 3 int8.
void *lib_session_kv(const void *model, int kv_type, int n_ctx, int n_seqs, int max_rows, int n_threads) {
    return session_open(model, (Type)kv_type, n_ctx, n_seqs, max_rows, max_rows, n_threads);
}

void lib_session_free(void *session) {
    session_free(session);
}

// logits: [rows that want them, vocab_size]
void lib_forward(void *session, int n, const int *token, const int *pos, const int *seq, const uint8_t *want,
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

void *lib_tokenizer(const char *path) {
    Checkpoint *checkpoint = checkpoint_open(path);
    Tokenizer *t = tokenizer_load(checkpoint);
    checkpoint_close(checkpoint);
    return t;
}

void lib_tokenizer_free(void *tokenizer) {
    tokenizer_free(tokenizer);
}

// Gives a list of ids to the caller, who has room for it.
static int take_ids(Ids *ids, int *out) {
    if (ids->len) memcpy(out, ids->id, (size_t)ids->len * sizeof *out);
    free(ids->id);
    return ids->len;
}

int lib_encode(const void *tokenizer, const char *text, int len, int bos, int *out) {
    const Tokenizer *t = tokenizer;
    Ids ids = {0};
    if (bos) ids_append(&ids, t->bos);
    tokenizer_encode(t, text, (size_t)len, false, &ids);
    return take_ids(&ids, out);
}

int lib_decode(const void *tokenizer, const int *ids, int n, char *out) {
    Decoder decoder = {0};
    Text text = {0};
    for (int i = 0; i < n; i++) decoder_push(&decoder, tokenizer, ids[i], &text);
    decoder_flush(&decoder, &text);
    if (text.len) memcpy(out, text.data, text.len);
    free(text.data);
    return (int)text.len;
}

// A conversation of n messages as ids: roles 0 system, 1 user, 2 assistant. template: a name, or NULL for the file's own.
int lib_chat(const void *tokenizer, const char *template, const char *source, int silent, int n, const int *roles,
             char *const *texts, int *out) {
    const Tokenizer *t = tokenizer;
    int kind = template ? word_index(template_words, template) : -1;
    Template chosen = template_choose(kind, source ? source : t->chat_template, t->path);
    chosen.silent = silent;
    Message *messages = alloc((size_t)n + 1, sizeof *messages, "messages");
    for (int i = 0; i < n; i++) messages[i] = (Message){(Role)roles[i], texts[i], strlen(texts[i])};
    Ids ids = template_render(&chosen, t, messages, n);
    free(messages);
    return take_ids(&ids, out);
}

void lib_seed(uint64_t seed, uint64_t *state) {
    *state = rng_seed(seed);
}

int lib_sample(const float *logits, int n, float temperature, float top_p, int top_k, float min_p, float repeat_penalty,
               const int *history, int n_history, uint64_t *state) {
    Sampling sampling = {temperature, top_p, min_p, repeat_penalty, top_k};
    Sampler *s = sampler_open(sampling, 1, n);
    s->rng = *state;
    int id = sampler_pick(s, logits, history, n_history);
    *state = s->rng;
    sampler_free(s);
    return id;
}

int lib_default_threads(void) {
    return default_threads();
}

// A row of a GGUF format as floats, cols of them.
void lib_unpack(uint32_t format, const uint8_t *row, int cols, float *out) {
    source_floats(&(Source){.format = format_by_id(format), .weights = row}, 0, cols, out);
}

// y[n][rows] = x[n][cols] . w^T for a matrix as a file stores it, row by row: a format of GGUF by its id (F32 is 0),
// or, with scales (float [rows][cols / group]), int8. Where `back` is not NULL it gets the matrix out of its panels
// again.
void lib_matmul(uint32_t format, int rows, int cols, int group, const uint8_t *w, const uint8_t *scales, const float *x,
                int n, float *y, int n_threads, float *back) {
    Source source = {scales ? FORMAT_INT8 : format_by_id(format), w, scales, (size_t)group, 0};
    Matrix matrix = matrix_load(rows, cols, &source, n_threads);
    Model m = {.any_quantized = is_quantized(matrix.type), .any_bf16 = matrix.type == BF16};
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
