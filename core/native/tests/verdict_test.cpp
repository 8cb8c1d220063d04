// Verdicts between ranks that share control windows: one culprit for all, whoever looks.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <memory>
#include <thread>
#include <vector>

#include "check.hpp"
#include "clock.hpp"
#include "peer_monitor.hpp"
#include "uccl_ep/shared_memory.hpp"
#include "uccl_ep/std_atomics.hpp"
#include "verdict.hpp"

using namespace uccl_ep;

namespace {

Verdict accuse(uint32_t reporter, uint32_t culprit, Reason reason) {
    Verdict verdict{};
    verdict.state = 1;
    verdict.reporter = reporter;
    verdict.culprit = culprit;
    verdict.reason = static_cast<uint32_t>(reason);
    return verdict;
}

struct Domain {
    explicit Domain(uint32_t num_ranks, bool share = true) {
        layout.num_ranks = num_ranks;
        layout.ranks_per_domain = num_ranks;
        layout.num_channels = 1;
        layout.num_slots = 1;
        layout.slot_bytes = 64;
        layout.arrange();
        std::vector<uint64_t> pointers;
        for (uint32_t i = 0; i < num_ranks; ++i) {
            memory.push_back(SharedMemory::create(layout.control_bytes(), false));
            pointers.push_back(memory.back().pointer());
        }
        for (uint32_t i = 0; i < num_ranks; ++i) {
            ranks.push_back(
                std::make_shared<Verdicts>(i, layout, pointers[i], share ? pointers : std::vector<uint64_t>{}));
        }
    }
    void waits(uint32_t rank, uint32_t for_rank) {
        StdAtomics::store_release_system(&ranks[rank]->header()->waiting_for, for_rank + 1);
    }

    Layout layout{};
    std::vector<SharedMemory> memory;
    std::vector<std::shared_ptr<Verdicts>> ranks;
};

}  // namespace

TEST(the_dead_before_the_refused_before_the_late) {
    const std::vector<Verdict> all = {accuse(0, 1, Reason::kTimeout), accuse(1, 3, Reason::kMismatch),
                                      accuse(2, 4, Reason::kDead)};
    CHECK_EQ(choose_verdict(all)->culprit, 4u);
    CHECK_EQ(choose_verdict({all[0], all[1]})->culprit, 3u);
    CHECK_EQ(choose_verdict({all[0]})->culprit, 1u);
    CHECK(!choose_verdict({}));
}

TEST(a_rank_that_accuses_nobody_is_the_culprit) {
    // 0 waits for 1, 1 for 2, 2 for 3; 3 is silent.
    CHECK_EQ(
        choose_verdict({accuse(0, 1, Reason::kTimeout), accuse(1, 2, Reason::kTimeout), accuse(2, 3, Reason::kTimeout)})
            ->culprit,
        3u);
    // 2 is dead, 1 saw it and left, which 0 took for a second death.
    CHECK_EQ(choose_verdict({accuse(0, 1, Reason::kDead), accuse(1, 2, Reason::kDead)})->culprit, 2u);
    // A ring of accusations: the lowest rank, on every rank alike.
    CHECK_EQ(
        choose_verdict({accuse(0, 2, Reason::kTimeout), accuse(2, 1, Reason::kTimeout), accuse(1, 0, Reason::kTimeout)})
            ->culprit,
        0u);
}

TEST(all_ranks_of_a_domain_agree_on_the_end_of_a_chain_of_waits) {
    Domain domain(4);
    domain.waits(0, 1);
    domain.waits(1, 2);
    domain.waits(2, 3);
    Verdict first = accuse(0, 1, Reason::kTimeout);
    first.signal = 17;
    first.expected = 5;
    first.seen = 4;
    CHECK(domain.ranks[0]->report(first));
    CHECK(!domain.ranks[0]->report(accuse(0, 2, Reason::kTimeout)));
    std::vector<std::thread> threads;
    uint32_t culprits[3] = {99, 99, 99};
    for (uint32_t rank = 0; rank < 3; ++rank) {
        threads.emplace_back([&, rank] {
            if (const auto verdict = domain.ranks[rank]->agree(0.3)) {
                culprits[rank] = verdict->culprit;
            }
        });
    }
    for (std::thread &thread : threads) {
        thread.join();
    }
    for (const uint32_t culprit : culprits) {
        CHECK_EQ(culprit, 3u);
    }
    for (uint32_t rank = 0; rank < 4; ++rank) {
        CHECK(domain.ranks[rank]->aborted());
        CHECK_EQ(domain.ranks[rank]->entry(0)->signal, 17u);
        CHECK_EQ(domain.ranks[rank]->entry(0)->seen, 4u);
    }
}

TEST(who_waited_to_the_end_speaks_before_who_was_told_to_end) {
    Verdict whole = accuse(2, 3, Reason::kTimeout);
    whole.elapsed_ns = 5;
    CHECK_EQ(choose_verdict({accuse(0, 3, Reason::kTimeout), whole})->reporter, 2u);
    // But the end of the chain counts more: 2 waited for 1, which was told to end while it waited for 0.
    whole.culprit = 1;
    CHECK_EQ(choose_verdict({accuse(1, 0, Reason::kTimeout), whole})->culprit, 0u);
}

TEST(nobody_failed_is_no_verdict_and_costs_no_wait) {
    Domain domain(2);
    const uint64_t start = now_ns();
    CHECK(!domain.ranks[0]->agree(5));
    CHECK(now_ns() - start < 1'000'000'000);
}

TEST(a_death_cuts_the_grace_short) {
    Domain domain(3);
    CHECK(domain.ranks[1]->report(2, Reason::kDead));
    const uint64_t start = now_ns();
    CHECK_EQ(domain.ranks[0]->agree(30)->culprit, 2u);
    CHECK(now_ns() - start < 5'000'000'000);
}

TEST(what_a_kernel_or_a_transport_wrote_is_spread_and_torn_entries_wait) {
    Domain domain(3);
    auto *entry = reinterpret_cast<Verdict *>(domain.memory[0].pointer() + Layout::verdict_offset(0));
    *entry = accuse(0, 2, Reason::kTimeout);
    domain.ranks[0]->scan();
    CHECK(domain.ranks[1]->aborted());
    CHECK_EQ(domain.ranks[1]->entry(0)->culprit, 2u);

    Domain apart(3, false);
    auto *remote = reinterpret_cast<Verdict *>(apart.memory[0].pointer() + Layout::verdict_offset(1));
    remote->state = 1;  // the first word came first
    apart.ranks[0]->scan();
    CHECK(!apart.ranks[0]->aborted());
    *remote = accuse(1, 2, Reason::kTransport);
    apart.ranks[0]->scan();
    CHECK(!apart.ranks[0]->aborted());  // seen once: may still be torn
    apart.ranks[0]->scan();
    CHECK(apart.ranks[0]->aborted());
    CHECK(!apart.ranks[1]->aborted());
}

namespace {

// A child that waits to be killed or told to leave.
pid_t child_process(int *talk) {
    int ends[2];
    if (pipe(ends) != 0) {
        throw std::runtime_error("pipe");
    }
    const pid_t pid = fork();
    if (pid == 0) {
        close(ends[1]);
        char byte = 0;
        (void)!read(ends[0], &byte, 1);
        _exit(0);
    }
    close(ends[0]);
    *talk = ends[1];
    return pid;
}

std::string identity_of(pid_t pid) {
    std::string identity = PeerMonitor::identity();
    const uint64_t number = static_cast<uint64_t>(pid);
    identity.replace(0, 8, reinterpret_cast<const char *>(&number), 8);
    std::string text;
    {
        std::unique_ptr<FILE, int (*)(FILE *)> file(fopen(("/proc/" + std::to_string(pid) + "/stat").c_str(), "r"),
                                                    fclose);
        char buffer[1024] = {};
        (void)!fread(buffer, 1, sizeof(buffer) - 1, file.get());
        text = buffer;
    }
    size_t at = text.rfind(')') + 1;
    for (int i = 0; i < 20; ++i) {  // from field 2, the name, to field 22
        at = text.find(' ', at) + 1;
    }
    const uint64_t start = std::stoull(text.substr(at));
    identity.replace(8, 8, reinterpret_cast<const char *>(&start), 8);
    return identity;
}

bool aborted_within(const Verdicts &verdicts, uint64_t limit_ns) {
    const uint64_t start = now_ns();
    while (!verdicts.aborted() && now_ns() - start < limit_ns) {
        std::this_thread::yield();
    }
    return verdicts.aborted();
}

}  // namespace

TEST(the_monitor_sees_a_kill_at_once_and_an_orderly_end_as_none) {
    for (const bool closes : {false, true}) {
        Domain domain(2);
        int talk = -1;
        const pid_t pid = child_process(&talk);
        PeerMonitor monitor(domain.ranks[0], {"", identity_of(pid)}, 5);
        CHECK(monitor.unwatched().empty());
        monitor.start();
        CHECK(!aborted_within(*domain.ranks[0], 20'000'000));
        if (closes) {
            StdAtomics::store_release_system(&domain.ranks[1]->header()->closed, 1);
        }
        kill(pid, SIGKILL);
        CHECK_EQ(aborted_within(*domain.ranks[0], closes ? 200'000'000 : 5'000'000'000), !closes);
        if (!closes) {
            const auto verdict = domain.ranks[0]->agree(1);
            CHECK_EQ(verdict->culprit, 1u);
            CHECK(verdict->reason == static_cast<uint32_t>(Reason::kDead));
        }
        waitpid(pid, nullptr, 0);
        close(talk);
        monitor.stop();
    }
}

TEST(another_process_with_the_same_number_is_a_dead_peer) {
    Domain domain(2);
    int talk = -1;
    const pid_t pid = child_process(&talk);
    std::string identity = identity_of(pid);
    identity[8] = static_cast<char>(identity[8] ^ 1);
    PeerMonitor monitor(domain.ranks[0], {"", identity}, 5);
    CHECK_EQ(domain.ranks[0]->agree(1)->culprit, 1u);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    close(talk);
}

TEST(a_peer_of_another_pid_namespace_is_watched_by_its_heart) {
    Domain domain(2);
    std::string identity = PeerMonitor::identity();
    identity[16] = static_cast<char>(identity[16] ^ 1);
    PeerMonitor monitor(domain.ranks[0], {"", identity}, 0.3);
    monitor.start();
    uint64_t *heart = &domain.ranks[1]->header()->heartbeat;
    const uint64_t start = now_ns();
    while (now_ns() - start < 1'000'000'000) {
        StdAtomics::store_release_system(heart, StdAtomics::load_acquire_system(heart) + 1);
        std::this_thread::yield();
    }
    CHECK(!domain.ranks[0]->aborted());
    CHECK(aborted_within(*domain.ranks[0], 10'000'000'000));
    CHECK_EQ(domain.ranks[0]->agree(1)->culprit, 1u);
}

TEST(time_in_which_this_process_did_not_run_is_nobodys_silence) {
    CHECK_EQ(silence_ns(1'000, 3'000), 2'000u);
    CHECK_EQ(silence_ns(3'000, 1'000), 0u);
    CHECK_EQ(silence_ns(1, 60'000'000'000), 100'000'000u);
}

TEST(waiting_for_a_rank_that_closed_ends) {
    Domain domain(2);
    PeerMonitor monitor(domain.ranks[0], {}, 5);
    monitor.start();
    StdAtomics::store_release_system(&domain.ranks[1]->header()->closed, 1);
    CHECK(!aborted_within(*domain.ranks[0], 100'000'000));
    domain.waits(0, 1);
    CHECK(aborted_within(*domain.ranks[0], 20'000'000'000));
    CHECK(domain.ranks[0]->agree(0.01)->reason == static_cast<uint32_t>(Reason::kClosed));
}

TEST(a_group_that_shrinks_notes_a_death_and_goes_on) {
    Domain domain(3);
    for (const auto &verdicts : domain.ranks) {
        verdicts->go_on_without_the_dead();
    }
    domain.ranks[0]->lost(2, Reason::kDead, 0);
    domain.ranks[0]->lost(2, Reason::kDead, 0);  // counted once, whoever notices it again
    CHECK(domain.ranks[0]->gone(2) && !domain.ranks[0]->gone(1) && !domain.ranks[1]->any_gone());
    CHECK(domain.ranks[0]->header()->gone == 1);
    CHECK(!domain.ranks[0]->aborted() && !domain.ranks[0]->agree(0.01));
    CHECK(domain.ranks[1]->report(0, Reason::kMismatch));  // other faults end the group as ever
    CHECK(domain.ranks[0]->aborted());
}

CHECK_MAIN()
