#include "words.hpp"

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace uccl_ep::ibverbs {
namespace {

struct Words {
    const char *name;
    const char *meaning;
    const char *advice;
    int error;  // positive errno
};

Words words_of(ibv_wc_status status) {
    switch (status) {
        case IBV_WC_RETRY_EXC_ERR:
            return {"transport retry counter exceeded", "the peer's NIC did not acknowledge in time",
                    "see whether the peer's process and link are up, then the path between the two (GID, MTU, traffic "
                    "class, lossless configuration); on a slow or lossy network raise the options timeout and retry",
                    ETIMEDOUT};
        case IBV_WC_RNR_RETRY_EXC_ERR:
            return {"receiver-not-ready retry counter exceeded", "the peer posts no receives for immediates",
                    "see whether the peer is stopped or its proxy starved of a core; raise the option receive_depth",
                    ETIMEDOUT};
        case IBV_WC_WR_FLUSH_ERR:
            return {"flushed", "the connection had failed or was closed before this write was carried out",
                    "look for the first error of this queue pair, and whether the peer closed or died", ECONNRESET};
        case IBV_WC_REM_ACCESS_ERR:
            return {"remote access error", "the peer's NIC refused the address or key",
                    "see whether the peer closed its buffer, and whether its windows have the size this rank assumes",
                    EACCES};
        case IBV_WC_REM_INV_REQ_ERR:
            return {"remote invalid request", "the peer's NIC does not serve this operation on this queue pair",
                    "compare firmware and drivers of the two ends; if the plan is counted, try plan=native or fenced",
                    EREMOTEIO};
        case IBV_WC_REM_OP_ERR:
            return {"remote operation error", "the peer's NIC could not carry out the operation",
                    "read the peer's kernel log and, for GPU memory, its GPU driver's", EREMOTEIO};
        case IBV_WC_LOC_PROT_ERR:
            return {"local protection error", "this NIC refused the local address or key",
                    "a window was unmapped or freed while it was in use", EFAULT};
        case IBV_WC_LOC_LEN_ERR:
            return {"local length error", "a message is longer than the device or the receive allows",
                    "lower general.slot_bytes", EMSGSIZE};
        case IBV_WC_LOC_QP_OP_ERR:
            return {"local queue pair operation error", "this NIC found the work request inconsistent",
                    "see the kernel log; a read may ask more than the device's max_qp_rd_atom", EINVAL};
        case IBV_WC_LOC_ACCESS_ERR:
            return {"local access error", "a peer wrote to this rank where its keys do not allow it",
                    "see whether both sides run the same version", EACCES};
        case IBV_WC_FATAL_ERR:
            return {"fatal error", "the device or its driver failed",
                    "read the kernel log; the device may be resetting", EIO};
        default:
            return {"error", "unusual for reads and writes on a connected queue pair", "read the kernel log", EIO};
    }
}

std::string where(const Place &place) {
    return place.device + ", towards rank " + std::to_string(place.peer) + " (lane " + std::to_string(place.lane) +
           ", queue pair " + std::to_string(place.qp_num) + ")";
}

}  // namespace

std::string describe_completion(ibv_wc_status status, uint32_t vendor_error, const Place &place) {
    const Words words = words_of(status);
    std::string text = where(place) + ": completion status " + std::to_string(static_cast<int>(status)) + " (" +
                       words.name + "): " + words.meaning + ". Try: " + words.advice + ".";
    if (vendor_error != 0) text += " Vendor's code " + std::to_string(vendor_error) + ".";
    return text;
}

std::string describe_post(int error, const Place &place) {
    error = std::abs(error);  // some providers return the negative number
    std::string text = where(place) + ": the device took no work request: " + std::strerror(error) + " (errno " +
                       std::to_string(error) + "). ";
    if (error == ENOMEM) return text + "Its queue is shorter than it said: lower the option send_depth.";
    if (error == EINVAL) return text + "It does not offer this operation or flag: try another plan, or inline_bytes=0.";
    return text + "See the kernel log.";
}

int errno_of(ibv_wc_status status) { return -words_of(status).error; }

}  // namespace uccl_ep::ibverbs
