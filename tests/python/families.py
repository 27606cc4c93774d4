"""The families of operators, as the pages of docs/operators name them, and which of them an operator of PyTorch's database belongs to."""

import re

# The first that matches the operator's name decides.
_PATTERNS = {
    "Attention": r"scaled_dot_product|attention",
    "Random numbers": r"^(normal|uniform|bernoulli|multinomial|poisson|rand|randn|randint|cauchy|exponential|geometric|log_normal)|_like$(?<=rand_like|andn_like|dint_like)|dropout|rrelu",
    "Fourier transforms": r"^fft\.|stft",
    "Norms": r"_norm$(?<!vector_norm)(?<!matrix_norm)|batch_norm|layer_norm|group_norm|local_response",
    "Softmax and losses": r"softmax|softmin|loss|cross_entropy|_nll",
    "Spatial": r"conv|pool|interpolate|upsample|pad$|pad_|functional\.(un)?fold$|pixel_|grid_sample|affine_grid|channel_shuffle|im2col|col2im|functional\.pad",
    "Products of matrices": r"matmul|^(mm|bmm|mv|dot|vdot|inner|outer|ger|addmm|addmv|addr|addbmm|baddbmm|einsum|tensordot|kron|_scaled_mm)|linalg\.(multi_dot|vecdot|matrix_power)|functional\.(linear|bilinear)|scaled_mm|^sparse\.",
    "Linear algebra": r"^linalg\.(?!vector_norm|norm|diagonal|cross|vander)|^(cholesky|lu|qr|svd|triangular|ormqr|geqrf|logdet|pinverse|symeig|lobpcg|matrix_exp|pca_lowrank)|cdist|pdist",
    "Indexing": r"gather|scatter|index|^take|^masked_|unsafe_masked|embedding|searchsorted|bucketize|^put|^nonzero|^where|getitem|argwhere|one_hot|diagonal_scatter|segment_reduce|cosine_embedding",
    "Factories, copies and casts": r"^(empty|zeros|ones|full|new_|arange|linspace|logspace|eye|scalar_tensor|clone|contiguous|to$|to_sparse|bool|byte|char|double|float|half|int|long|short|cfloat|cdouble|chalf|bfloat16|type_as|item|fill|zero|tril_indices|triu_indices|signal)|_like",
    "Reductions, scans and sorts": r"^(sum|mean|prod|std|var|amax|amin|max|min|argmax|argmin|all|any|norm|count_nonzero|nan|median|mode|kthvalue|topk|sort|argsort|msort|cum|logcum|logsumexp|aminmax|histc|histogram|bincount|unique|trace|dist|quantile|renorm|hash_tensor|trapezoid|trapz|cov|corrcoef|diff|gradient|isin|allclose|equal)|linalg\.(vector_norm|norm)|cosine_similarity|pairwise_distance|normalize|reduction|^masked\.(?!logaddexp|softm|log_softm)",
    "Views, splits and joins": r"view|reshape|^(t|t_copy|T|H|mT|mH|alias_copy|detach|adjoint)$|transpose|permute|squeeze|expand|narrow|slice|select|split|chunk|stack|^cat|concat|block_diag|diag|flatten|movedim|swap|unbind|as_strided|broadcast|resize|ravel|atleast|tile|repeat|rot90|flip|roll|tril|triu|tensor_split|meshgrid|conj$|conj_physical|real|imag|cartesian|combinations|unravel|vander|resolve|hankel|^unfold",
}
_COMPILED = {family: re.compile(pattern) for family, pattern in _PATTERNS.items()}

FAMILIES = ("Elementwise", *_PATTERNS)


def family_of(op):
    kind = type(op).__name__
    if kind in ("UnaryUfuncInfo", "BinaryUfuncInfo"):
        return "Elementwise"
    if kind == "SpectralFuncInfo":
        return "Fourier transforms"
    for family, pattern in _COMPILED.items():
        if pattern.search(op.name):
            return family
    return "Reductions, scans and sorts" if kind == "ReductionOpInfo" else "Elementwise"
