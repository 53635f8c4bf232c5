//! Tests of the script tests/install-servers. It runs with a temporary folder in place of the
//! machine's folders. In place of the program that installs, there is one that only asks the policy
//! whether a service may start.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

use libtest_mimic::Trial;
use tempfile::TempDir;

use crate::facts;

pub(crate) fn facts() -> Vec<Trial> {
    facts![Ok(());
        no_service_may_start_while_packages_are_installed
        the_policy_of_the_machine_survives_a_signal_at_any_command
    ]
}

const SCRIPT: &str = include_str!("../install-servers");

/// The programs that the script calls while the policy is replaced.
const CALLED: [&str; 5] = ["apt-get", "chmod", "grep", "mv", "rm"];

/// The machine's policy for services.
const POLICY: &str = "#!/bin/sh\nexit 0\n";

/// The moment of the signal.
#[derive(Clone, Copy, Debug, PartialEq)]
enum When {
    /// It ends the called program too, before this has done its work.
    During,
    After,
}

/// The program that installs fails if the policy does not deny the start of a service. The script
/// must end as usual.
fn no_service_may_start_while_packages_are_installed() {
    for policy in [Some(POLICY), None] {
        assert_eq!(stopped_at(u32::MAX, When::After, policy), Stopped::No);
    }
}

fn the_policy_of_the_machine_survives_a_signal_at_any_command() {
    for when in [When::During, When::After] {
        for policy in [Some(POLICY), None] {
            let mut call = 1;
            while let Stopped::Yes = stopped_at(call, when, policy) {
                call += 1;
            }
            assert!(call > 5, "only {} calls were tried", call - 1);
        }
    }
}

#[derive(Debug, PartialEq)]
enum Stopped {
    Yes,
    /// The script has made fewer calls, and has ended as usual.
    No,
}

/// Runs the script, and sends it a signal at one of its calls. Afterwards the folder must be as it
/// was before.
fn stopped_at(call: u32, when: When, policy: Option<&str>) -> Stopped {
    let folder = tempfile::tempdir().unwrap();
    let machine = folder.path().join("sbin");
    fs::create_dir(&machine).unwrap();
    if let Some(policy) = policy {
        fs::write(machine.join("policy-rc.d"), policy).unwrap();
    }

    let ended = Command::new("bash")
        .args([
            "-c",
            &script_in(folder.path()),
            "install-servers",
            "a-server",
        ])
        .env("PATH", path_with(&folder, call, when))
        .output()
        .unwrap();

    let shown = format!("call {call}, {when:?}: {ended:?}");
    let left: Vec<_> = fs::read_dir(&machine)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    match policy {
        Some(policy) => {
            assert_eq!(left, ["policy-rc.d"], "{shown}");
            let is = fs::read_to_string(machine.join("policy-rc.d")).unwrap();
            assert_eq!(is, policy, "{shown}");
        }
        None => assert!(left.is_empty(), "{left:?}, {shown}"),
    }
    let calls = fs::read_to_string(folder.path().join("calls")).unwrap();
    match calls.lines().count() < call as usize {
        true => {
            assert!(ended.status.success(), "{shown}");
            Stopped::No
        }
        false => Stopped::Yes,
    }
}

/// The script with the paths of a folder.
fn script_in(folder: &Path) -> String {
    let mut script = SCRIPT.to_owned();
    for (machine, here) in [
        ("/usr/sbin/policy-rc.d", "sbin/policy-rc.d"),
        ("/run/lockcore-install-servers.lock", "lock"),
    ] {
        assert_eq!(script.matches(machine).count(), 1, "{machine}");
        script = script.replace(machine, folder.join(here).to_str().unwrap());
    }
    script
}

/// Programs that count the calls and send the signal, in front of the machine's own programs.
fn path_with(folder: &TempDir, call: u32, when: When) -> String {
    let programs = folder.path().join("bin");
    fs::create_dir(&programs).unwrap();
    let calls = folder.path().join("calls");
    let policy = folder.path().join("sbin/policy-rc.d");
    let policy = policy.display();
    let path = std::env::var("PATH").unwrap();
    for name in CALLED {
        let work = match name {
            // 101 is the answer that a service may not be started.
            "apt-get" => format!("'{policy}' a-server start\n[ $? -eq 101 ]"),
            _ => format!("PATH='{path}' {name} \"$@\""),
        };
        let is_now = format!(
            "[ \"$(wc -l < '{calls}')\" -eq {call} ]",
            calls = calls.display()
        );
        // The shell of the script acts on the signal when the program has ended.
        let body = match when {
            When::During => format!("if {is_now}; then kill -TERM $PPID $$; fi\n{work}\n"),
            When::After => {
                format!("{work}\nstatus=$?\nif {is_now}; then kill -TERM $PPID; fi\nexit $status\n")
            }
        };
        let program = programs.join(name);
        let text = format!("#!/bin/sh\necho {name} >> '{}'\n{body}", calls.display());
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    }
    let nothing = programs.join("dpkg-query"); // no package is there before or after
    fs::write(&nothing, "#!/bin/sh\n").unwrap();
    fs::set_permissions(&nothing, fs::Permissions::from_mode(0o755)).unwrap();
    format!("{}:{path}", programs.display())
}
