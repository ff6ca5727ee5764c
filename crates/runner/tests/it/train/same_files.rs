//! Ranks that see other files than rank 0: all are told, and none changes anything.

use std::fs;
use std::process::{Child, Command, Stdio};

use super::*;

const RUNNER: &str = env!("CARGO_BIN_EXE_runner");

/// Runs `runner` with `args` on two ranks, each in its own directory, as on nodes with their own
/// disks. Returns exit codes and error texts.
fn ranks(dirs: [&Path; 2], args: &[&str]) -> [(Option<i32>, String); 2] {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| -> Child {
        let mut command = Command::new(RUNNER);
        command.args(args).current_dir(dirs[rank]);
        command.env("RANK", rank.to_string()).env("LOCAL_RANK", rank.to_string());
        command.envs([("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
        command.env("MASTER_PORT", port.to_string());
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        command.spawn().unwrap()
    };
    [start(0), start(1)].map(|child| {
        let output = child.wait_with_output().unwrap();
        (output.status.code(), String::from_utf8(output.stderr).unwrap())
    })
}

/// Two directories with runs of equal length and names, but of different seeds.
fn two_runs(dir: &Path) -> [std::path::PathBuf; 2] {
    ["a", "b"].map(|name| {
        let dir = dir.join(name);
        fs::create_dir(&dir).unwrap();
        let config = format!("env_cfg.dist_cfg.timeout = '60s'\n{MLP}");
        fs::write(dir.join("c.toml"), &config).unwrap();
        let seed = if name == "a" { "seed = 3" } else { "seed = 4" };
        let config = config.replace("seed = 3", seed).replace("max_epochs = 2", "max_epochs = 1");
        for outcome in run(&config, &dir.join("run"), 2, |builder, _| builder) {
            outcome.unwrap();
        }
        dir
    })
}

#[test]
fn resume_refuses_files_of_different_runs() {
    let dir = tempfile::tempdir().unwrap();
    let [a, b] = two_runs(dir.path());
    let state = |dir: &Path| fs::read(dir.join("run/epoch_1/state.json")).unwrap();
    let before = [state(&a), state(&b)];
    let resume = ["train", "c.toml", "--work-dir", "run", "--resume"];
    let other = "rank 1 has another checkpoint at run/epoch_1 than rank 0";
    for (code, said) in ranks([&a, &b], &resume) {
        assert!(code == Some(1) && said.contains(other), "{said}");
    }
    assert_eq!([state(&a), state(&b)], before);
    assert_eq!(checkpoints(&a.join("run")), ["epoch_1"]);
    // Its weights alone, too.
    let from = ["train", "c.toml", "--work-dir", "new", "--load-from", "run/epoch_1"];
    for (code, said) in ranks([&a, &b], &from) {
        assert!(code == Some(1) && said.contains(other), "{said}");
    }
    // Without a file on rank 1.
    fs::remove_file(b.join("run/epoch_1/optimizer.safetensors")).unwrap();
    let absent = "run/epoch_1/optimizer.safetensors: No such file";
    for (rank, (code, said)) in ranks([&a, &b], &resume).into_iter().enumerate() {
        let is_named = said.contains(absent) && (rank == 1 || said.contains("rank 1: "));
        assert!(code == Some(1) && is_named, "{said}");
    }
    // On rank 1 only.
    let empty = dir.path().join("empty");
    fs::create_dir(&empty).unwrap();
    fs::copy(a.join("c.toml"), empty.join("c.toml")).unwrap();
    for (code, said) in ranks([&empty, &a], &resume) {
        let absent = "rank 0 sees no checkpoint in run, but rank 1 does (run/epoch_1)";
        assert!(code == Some(1) && said.contains(absent), "{said}");
    }
    assert_eq!(checkpoints(&empty.join("run")), [""; 0]);
    // The same files.
    for (code, said) in ranks([&a, &a], &resume) {
        assert_eq!(code, Some(0), "{said}");
    }
}

#[test]
fn refused_resume_leaves_the_model_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    killed(MLP, dir.path(), 1, 26);
    let weights = |runner: &mut Runner| {
        let mut all = Vec::new();
        runner.engine_mut().with_params(&mut |slices| {
            all = slices.iter().map(|slice| format!("{slice:?}")).collect();
            Ok(())
        })?;
        Ok::<_, Error>((
            all,
            runner.lr(),
            runner.position().clone(),
            runner.optim_wrapper().loss_scale(),
        ))
    };
    let schedule = "[[param_scheduler]]\ntype = 'StepLR'\nstep_size = 1\n";
    let hidden = MLP.replace("hidden = [8]", "hidden = [9]");
    let more = format!("{MLP}{schedule}");
    let adam =
        MLP.replace("type = \"SGD\", lr = 0.05, momentum = 0.9", "type = \"Adam\", lr = 0.01");
    let cases = [
        (&*adam, "into \"adam\""),
        (&*hidden, "`layers.0.weight` is F32 [8, 64]"),
        (&*more, "has 0 schedulers"),
    ];
    for (config, reason) in cases {
        let config = Config::from_text("c.toml", config).unwrap();
        let group = ProcessGroup::threads(1, Duration::from_secs(60)).unwrap().remove(0);
        let builder = from_config(config).unwrap().work_dir(dir.path()).resume(true);
        let mut runner = builder.process_group(group).build().unwrap();
        let before = weights(&mut runner).unwrap();
        let said = runner.train().unwrap_err().to_string();
        assert!(said.contains(reason), "{said}");
        assert_eq!(weights(&mut runner).unwrap(), before, "{reason}");
    }
}

/// As after a kill between the checkpoint and what follows it.
#[test]
fn resume_of_a_finished_run_mends_the_pointer_and_removes_old_checkpoints() {
    let dir = tempfile::tempdir().unwrap();
    let config = format!("{MLP}[default_hooks]\ncheckpoint.max_keep_ckpts = 1\n");
    let kept = dir.path().join("kept");
    for outcome in run(&config, dir.path(), 1, |builder, _| {
        let from = dir.path().join("epoch_1");
        let to = kept.clone();
        builder.hook(before_iter(30, move |_| {
            fs::create_dir(&to).unwrap();
            walk(&from).iter().for_each(|file| {
                fs::copy(file, to.join(file.file_name().unwrap())).unwrap();
            });
            Ok(())
        }))
    }) {
        outcome.unwrap();
    }
    assert_eq!(checkpoints(dir.path()), ["epoch_2", "kept"]);
    fs::rename(&kept, dir.path().join("epoch_1")).unwrap();
    fs::remove_file(dir.path().join("last_checkpoint")).unwrap();
    resume(&config, dir.path(), 1);
    assert_eq!(checkpoints(dir.path()), ["epoch_2"]);
    assert_eq!(fs::read_to_string(dir.path().join("last_checkpoint")).unwrap(), "epoch_2");
}

#[test]
fn hook_cannot_save_under_an_invalid_name() {
    for name in ["", "a/b", "last_checkpoint", ".runner.lock"] {
        let dir = tempfile::tempdir().unwrap();
        let outcome = run(MLP, &dir.path().join("run"), 2, |builder, _| {
            let save = move |runner: &mut Runner| {
                let save = runner::Save::weights(name, runner.position().clone());
                runner.save_checkpoint(save).map(drop)
            };
            builder.hook(before_iter(3, save))
        });
        for outcome in outcome {
            let said = outcome.unwrap_err().to_string();
            assert!(said.contains(&format!("a checkpoint cannot be called {name:?}")), "{said}");
        }
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
    }
}

#[test]
fn work_directory_may_have_a_name_that_is_not_utf8() {
    use std::os::unix::ffi::OsStringExt;
    let dir = tempfile::tempdir().unwrap();
    let odd = dir.path().join(std::ffi::OsString::from_vec(vec![b'r', 0xff]));
    killed(MLP, &odd, 2, 14);
    resume(MLP, &odd, 2);
    let next = dir.path().join("next");
    for outcome in run(MLP, &next, 2, |builder, _| builder.load_from(odd.join("epoch_2"))) {
        outcome.unwrap();
    }
    assert_eq!(checkpoints(&next), ["epoch_1", "epoch_2"]);
}
